"""Weights through shared memory: a commit is a change of pointers."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from headrace.errors import WeightsError
from headrace.sync.manifest import plan
from headrace.types.weights import Manifest, TensorEntry, WeightUpdate

NUM_SLOTS = 2


class ShmPublisher:
    """Owns a file of two slots in shared memory and fills them. ``tensors`` are the learner's, by name; they are read
    at every :meth:`copy`."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.manifest = plan(tensors)
        self._path = path
        self._tensors = list(tensors.values())
        needed = self.manifest.total_bytes * NUM_SLOTS
        self._map = _create(path, needed)
        self._slots = [_views(self._map, self.manifest, slot) for slot in range(NUM_SLOTS)]

    def copy(self, slot: int) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._slots[slot], [tensor.detach() for tensor in self._tensors])

    def fill(self, slot: int, tensors: Iterable[Tensor]) -> None:
        """As :meth:`copy`, with ``tensors``, which come one at a time in the order of the learner's."""
        for view, tensor in zip(self._slots[slot], tensors, strict=True):
            view.copy_(tensor)

    def announce(self, version: int, slot: int) -> WeightUpdate:
        return WeightUpdate(
            version=version,
            slot=slot,
            path=str(self._path),
            manifest=self.manifest,
            checksums=checksums(self._map, self.manifest, slot),
        )

    def close(self) -> None:
        self._slots.clear()
        self._path.unlink(missing_ok=True)


class ShmReceiver:
    """Points the engine's ``tensors`` (parameters and buffers, by name) into the committed slot."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._manifest = plan(tensors)
        self._tensors = [tensors[entry.name] for entry in self._manifest.entries]
        self._map: mmap.mmap | None = None
        self._map_path = ""
        self._staged: tuple[int, list[Tensor]] | None = None
        self._staging = threading.Lock()
        self._committed = -1

    def stage(self, update: WeightUpdate) -> None:
        self._refuse_if_unfit(update)
        attached = self._attach(update)
        actual = checksums(attached, update.manifest, update.slot)
        for entry, expected, found in zip(update.manifest.entries, update.checksums, actual, strict=True):
            if expected != found:
                raise WeightsError(
                    f"version {update.version}: tensor {entry.name} hashes to {found:016x}, announced {expected:016x}",
                    remedy="publish the version again: its bytes changed on the way",
                )
        named = {entry.name: entry for entry in update.manifest.entries}  # the learner may list them in another order
        start = update.slot * update.manifest.total_bytes
        views = [_view(attached, named[entry.name], start) for entry in self._manifest.entries]
        with self._staging:
            self._staged = (update.version, views)

    def commit(self, version: int) -> None:
        for _ in self.commit_parts(version, 1):
            pass

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        with self._staging:  # another thread may stage the next version at this very moment
            staged = self._staged
            if staged is None or staged[0] != version:
                words = "nothing" if staged is None else f"version {staged[0]}"
                raise WeightsError(f"commit of version {version}, but {words} is staged", remedy="stage it first")
            views, self._staged = staged[1], None
        return self._exchange(version, views, -(-len(views) // parts))

    def _exchange(self, version: int, views: list[Tensor], at_once: int) -> Iterator[None]:
        for place, (tensor, view) in enumerate(zip(self._tensors, views, strict=True)):
            if place and place % at_once == 0:
                yield
            tensor.data = view
        self._committed = version

    def _refuse_if_unfit(self, update: WeightUpdate) -> None:
        if update.version <= self._committed:
            raise WeightsError(
                f"version {update.version} is not newer than the committed version {self._committed}",
                remedy="publish versions in order",
            )
        differences = self._manifest.differences(update.manifest)
        if differences:
            raise WeightsError(
                f"version {update.version} does not fit the engine's model: {'; '.join(differences)}",
                remedy="give engine and learner the same model directory and dtype",
            )
        if update.slot not in range(NUM_SLOTS) or len(update.checksums) != len(update.manifest.entries):
            raise WeightsError(
                f"version {update.version} is announced in slot {update.slot} of {NUM_SLOTS}, with "
                f"{len(update.checksums)} checksums for {len(update.manifest.entries)} tensors",
                remedy="publish the version again",
            )

    def _attach(self, update: WeightUpdate) -> mmap.mmap:
        if self._map is None or self._map_path != update.path:
            needed = update.manifest.total_bytes * NUM_SLOTS
            try:
                size = os.stat(update.path).st_size
                if size < needed:
                    raise WeightsError(
                        f"shared buffer {update.path} has {size} bytes, the manifest needs {needed}",
                        remedy="publish the version again",
                    )
                with open(update.path, "r+b") as file:
                    self._map = mmap.mmap(file.fileno(), needed)
            except OSError as error:
                raise WeightsError(
                    f"shared buffer {update.path} cannot be opened: {error}",
                    remedy="engine and learner of the shm transport must run on one machine, as one user",
                ) from None
            self._map_path = update.path
        return self._map


def checksums(buffer: mmap.mmap, manifest: Manifest, slot: int) -> tuple[int, ...]:
    """xxh3 of each tensor's bytes in ``slot``."""
    start = slot * manifest.total_bytes
    with memoryview(buffer) as view:
        return tuple(xxhash.xxh3_64_intdigest(view[begin : begin + entry.num_bytes]) for entry, begin in (
            (entry, start + entry.offset_bytes) for entry in manifest.entries
        ))  # fmt: skip


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    """A mapped file with its pages really there: a full /dev/shm is an error now, not a bus error later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"two copies of the weights need {num_bytes} bytes of shared memory at {path.parent}: {error}",
            remedy=f"free that much there (df -h {path.parent}), or enlarge it: mount -o remount,size=... /dev/shm",
        ) from None


def _views(buffer: mmap.mmap, manifest: Manifest, slot: int) -> list[Tensor]:
    start = slot * manifest.total_bytes
    return [_view(buffer, entry, start) for entry in manifest.entries]


def _view(buffer: mmap.mmap, entry: TensorEntry, start: int) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = entry.num_bytes // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + entry.offset_bytes)
    return flat.view(entry.shape)
