"""The engine's side: updates fetched, decoded and verified beside the model; a commit is a change of pointers.

    update ─fits? newer?─▶ payload ─decode─▶ image ─hash─▶ tensors of the engine's dtype ─commit─▶ parameter.data
                           lent or fetched                 views of the image where nothing is converted

What the transport does not lend is brought into one of two rooms: the model uses one, the other is free. On a GPU the
first room is the memory that the model was loaded into, and the second is taken at once: who plans with the memory that
is free then (the engine's cache) counts it. Phases are drawn in :mod:`headrace.sync.base`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.sync.base import NUM_SLOTS, Codec, Inbox, Phase
from headrace.sync.codecs import delta
from headrace.sync.manifest import checksums, plan, private_memory, view


@dataclass(slots=True, kw_only=True)
class _VersionBuffer:
    """Memory for one version, taken when it is first needed."""

    image: memoryview | None = None
    own: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are converted or moved, by name."""
    views: tuple[memoryview, list[list[Tensor]]] | None = None
    """An image that will be used again, and what lies in it: to make a view takes longer than to hash a small
    tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReceivedVersion:
    """A version that is here and verified."""

    version: int
    manifest: Manifest
    image: memoryview
    tensors: list[Tensor]
    room: int


class Receiver:
    """Brings versions into ``tensors``, the engine's parameters and buffers by name. One thread stages; another may
    commit meanwhile."""

    def __init__(self, tensors: Mapping[str, Tensor], codec: Codec, open_inbox: Callable[[int], Inbox]) -> None:
        """``open_inbox`` is told how many bytes an update has at most."""
        self._codec = codec
        self._targets = dict(tensors)
        self._devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._parts = {name: codec.form.parts(name, tensor) for name, tensor in tensors.items()}
        self.manifest = plan({name: part for parts in self._parts.values() for name, part in parts.items()})
        self._inbox = open_inbox(self.manifest.total_bytes)
        away = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        self._rooms = (
            _VersionBuffer(own={name: tensor.data for name, tensor in away.items()}),
            _VersionBuffer(own={name: torch.empty_like(tensor.data) for name, tensor in away.items()}),
        )
        self._lock = threading.Lock()
        self._staged: _ReceivedVersion | None = None
        self._used: _ReceivedVersion | None = None
        self._past: list[Tensor] = []
        """What was used before: let go of while staging, since giving memory back takes long."""
        self._exchanging: int | None = None
        self._needs_full = True
        self._fitting: Manifest | None = None
        """The last layout that was found to be right."""
        self.phase = Phase.NEEDS_FULL
        """Of the latest update."""

    @property
    def committed(self) -> int:
        """The version in use; −1 before the first."""
        return NOT_SAMPLED if self._used is None else self._used.version

    @property
    def address(self) -> str:
        """Where updates can be sent to; empty where nobody has to know."""
        return self._inbox.address

    def stage(self, update: WeightUpdate) -> None:
        """Check layout, order and checksums, and bring what has to be brought; may run in another thread than the
        decoding.

        Raises :class:`~headrace.base.errors.NeedsFull` where the same version, sent whole, could be used, and
        :class:`~headrace.base.errors.WeightsError` where it could not; nothing that is used has changed then.
        """
        try:
            with self._lock:  # from here to the end nothing is staged, so that no commit can begin meanwhile
                self._refuse_unfit(update)
                self._refuse_others(update)
                base = self._base(update)
                self._staged = None
                past, self._past = self._past, [] if self._used else [each.data for each in self._targets.values()]
        except WeightsError as refusal:
            self.phase = Phase.NEEDS_FULL if isinstance(refusal, NeedsFull) else Phase.REFUSED
            self._inbox.skip(update)
            raise
        del past  # what takes long, and so not while a commit would have to wait for it
        self.phase = Phase.STAGED
        try:
            brought = self._bring(update, base)
        except BaseException:
            self.phase, self._needs_full = Phase.NEEDS_FULL, True
            raise
        with self._lock:
            self._staged = brought
            self.phase = Phase.VERIFIED

    def staged(self) -> dict[str, Tensor]:
        """The tensors of the version that is verified and not in use yet, by name; empty where there is none."""
        with self._lock:
            return {} if self._staged is None else dict(zip(self._targets, self._staged.tensors, strict=True))

    def commit(self, version: int) -> None:
        """Use the staged version; a change of pointers."""
        for _ in self.commit_parts(version, 1):
            pass

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Use the staged version in ``parts`` changes, each made when the iterator is advanced; after the last one it
        ends. What stands in between is neither the old version nor the new one.

        Raises :class:`~headrace.base.errors.WeightsError` at once if ``version`` is not staged. The next one can be
        staged only after the last change.
        """
        with self._lock:  # another thread may stage the next version at this very moment
            staged = self._staged
            if staged is None or staged.version != version:
                words = "nothing" if staged is None else f"version {staged.version}"
                raise WeightsError(f"commit of version {version}, but {words} is staged", remedy="stage it first")
            self._staged, self._exchanging = None, version
        return self._exchange(staged, -(-len(staged.tensors) // parts))

    def close(self) -> None:
        """Let go of the transport; the model keeps its weights."""
        self._inbox.close()

    def _exchange(self, brought: _ReceivedVersion, at_once: int) -> Iterator[None]:
        pairs = list(zip(self._targets.values(), brought.tensors, strict=True))
        for start in range(0, len(pairs), at_once):
            if start:
                yield
            for tensor, new in pairs[start : start + at_once]:
                tensor.data = new
        with self._lock:
            if self._used is not None:
                self._past = self._used.tensors
            self._used, self._exchanging = brought, None
            self._needs_full = False
            if self.phase is Phase.VERIFIED and self._staged is None:
                self.phase = Phase.COMMITTED

    def _refuse_unfit(self, update: WeightUpdate) -> None:
        if update.version <= self.committed:
            raise WeightsError(
                f"version {update.version} is not newer than the committed version {self.committed}",
                remedy="publish versions in order",
            )
        if self._exchanging is not None:
            raise WeightsError(
                f"version {self._exchanging} is still coming into use, and version {update.version} needs its place",
                remedy="wait for the commit's report",
            )
        if update.manifest != self._fitting:  # it is the same for every version of a run
            differences = self.manifest.differences(update.manifest)
            if differences:
                raise WeightsError(
                    f"version {update.version} does not fit the engine's model: {'; '.join(differences)}",
                    remedy="give engine and learner the same model directory, dtype and sync.codec",
                )
            _refuse_other_layout(update)
            self._fitting = update.manifest
            for room in self._rooms:
                room.views = None
        _refuse_impossible(update)

    def _refuse_others(self, update: WeightUpdate) -> None:
        """What was sent, and not to here, is not waited for."""
        if self.address and self.address not in update.to:
            raise NeedsFull(
                f"version {update.version} was sent to {', '.join(update.to) or 'nobody'}, and this engine is "
                f"{self.address}",
                remedy="send it again, to the engines that are there now",
            )

    def _base(self, update: WeightUpdate) -> memoryview | None:
        """What the update is a difference from; ``None`` if it is whole."""
        if update.base is None:
            return None
        used = self._used
        if used is None or self._needs_full or used.version != update.base or used.manifest != update.manifest:
            words = "an update failed before" if used and self._needs_full else f"version {self.committed} is in use"
            raise NeedsFull(
                f"version {update.version} is a difference from version {update.base}, and {words}",
                remedy=f"send version {update.version} whole",
            )
        return used.image

    def _bring(self, update: WeightUpdate, base: memoryview | None) -> _ReceivedVersion:
        place = 1 if self._used is None else 1 - self._used.room
        image = self._inbox.lend(update)
        if image is None or base is not None:
            image = self._received(update, base, image, self._image_of(place, update))
        self._verify(update, image)
        with _beside_the_passes(self._devices):
            tensors = self._tensors(update.manifest, image, place)
        return _ReceivedVersion(
            version=update.version, manifest=update.manifest, image=image, tensors=tensors, room=place
        )

    def _received(
        self, update: WeightUpdate, base: memoryview | None, lent: memoryview | None, image: memoryview
    ) -> memoryview:
        if base is None:
            self._inbox.fetch(update, image)
            return image
        if lent is None:
            lent = private_memory(update.num_bytes)
            self._inbox.fetch(update, lent)
        delta.decode(lent, base, image, update.manifest)
        return image

    def _image_of(self, place: int, update: WeightUpdate) -> memoryview:
        room = self._rooms[place]
        if room.image is None:
            room.image = private_memory(update.manifest.total_bytes)
        return room.image

    def _verify(self, update: WeightUpdate, image: memoryview) -> None:
        found = checksums(image, update.manifest)
        for entry, expected, actual in zip(update.manifest.entries, update.checksums, found, strict=True):
            if expected != actual:
                raise NeedsFull(
                    f"version {update.version}: tensor {entry.name} hashes to {actual:016x}, announced {expected:016x}",
                    remedy="send the version again, whole: its bytes changed on the way",
                )

    @torch.no_grad()
    def _tensors(self, manifest: Manifest, image: memoryview, place: int) -> list[Tensor]:
        tensors = []
        for (name, target), parts in zip(self._targets.items(), self._views(manifest, image, place), strict=True):
            first = parts[0]
            if len(parts) == 1 and first.dtype == target.dtype and first.device == target.device:
                tensors.append(first)
                continue
            if name not in self._rooms[place].own:
                self._rooms[place].own[name] = torch.empty_like(target)
            out = self._rooms[place].own[name]
            self._codec.form.read(parts, out)
            tensors.append(out)
        return tensors

    def _views(self, manifest: Manifest, image: memoryview, place: int) -> list[list[Tensor]]:
        """What each target is made of, where it lies."""
        room = self._rooms[place]
        if room.views is not None and room.views[0] is image:
            return room.views[1]
        entries = {entry.name: entry for entry in manifest.entries}  # the learner may list them in another order
        views = [[view(image, entries[part]) for part in parts] for parts in self._parts.values()]
        room.views = (image, views) if image is room.image or self._inbox.lasting else None
        return views


@contextmanager
def _beside_the_passes(devices: Iterable[torch.device]) -> Iterator[None]:
    """What is copied to GPUs within this is there when it ends, and the passes that run meanwhile do not wait for it.

    A stream of its own begins after what is already ordered: a pass that still reads the room that is filled now.
    """
    with ExitStack() as streams:
        for device in devices:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.default_stream(device))
            streams.callback(stream.synchronize)
            streams.enter_context(torch.cuda.stream(stream))
        yield


def _refuse_other_layout(update: WeightUpdate) -> None:
    """Offsets and sizes are read as they are announced: they must be those that names, dtypes and shapes give."""
    tensors = {
        entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        for entry in update.manifest.entries
    }
    if plan(tensors) != update.manifest:
        raise WeightsError(
            f"version {update.version} is announced with {len(update.manifest.entries)} tensors that do not lie one "
            f"after the other in an image of {update.manifest.total_bytes} bytes",
            remedy="use one version of headrace for engine and learner",
        )


def _refuse_impossible(update: WeightUpdate) -> None:
    """An announcement that cannot be right, whatever the bytes; what it says is used as sizes and places below."""
    manifest = update.manifest
    if update.slot not in range(NUM_SLOTS) or len(update.checksums) != len(manifest.entries):
        raise WeightsError(
            f"version {update.version} is announced in slot {update.slot} of {NUM_SLOTS}, with "
            f"{len(update.checksums)} checksums for {len(manifest.entries)} tensors",
            remedy="publish the version again",
        )
    total, whole = manifest.total_bytes, update.base is None
    if not (update.num_bytes == total if whole else 0 <= update.num_bytes < total):
        raise WeightsError(
            f"version {update.version} is announced with {update.num_bytes} bytes, for an image of {total}",
            remedy="publish the version again",
        )
