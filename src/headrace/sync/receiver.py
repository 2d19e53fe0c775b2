"""The engine's side of the weight sync, which fetches, decodes and verifies updates beside the weights in use. An
*image* is the bytes of all tensors of a version; a *payload* is an image or its difference from another image.

    update ─fits? newer?─▶ payload ─decode─▶ image ─hash─▶ tensors of the engine's dtype ─commit─▶ parameter.data
                           viewed or fetched               views of the image, unless converted

A commit only changes pointers. A payload that cannot be viewed in place is written to one of two buffers: the model
uses one buffer, and the other is free. On a GPU, the first buffer is the memory into which the model was loaded. The
second buffer is allocated at the start, so that the engine's cache is sized by the memory that remains. See
:class:`headrace.sync.base.Phase` for the phases of an update.
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
from headrace.base.types.weights import NUM_SLOTS, Manifest, RankLayout, WeightUpdate
from headrace.sync import pieces
from headrace.sync.base import Codec, Inbox, Phase
from headrace.sync.codecs import delta
from headrace.sync.manifest import checksums, plan, private_memory, view


@dataclass(slots=True, kw_only=True)
class _VersionBuffer:
    """The memory for one of two versions in an engine, allocated at its first use."""

    image: memoryview | None = None
    """The memory for an image that is fetched or decoded; ``None`` before the first one."""
    own: dict[str, Tensor] = field(default_factory=dict)
    """The tensors that are converted to another dtype or moved to another device, by name."""
    views: tuple[memoryview, list[list[Tensor]]] | None = None
    """An image whose memory will be used again, with the views into it; else ``None``. Views are kept because making
    one takes longer than hashing a small tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReceivedVersion:
    """A version that has arrived and is verified: it is staged, or in use."""

    version: int
    """The number of the version."""
    manifest: Manifest
    """The layout of the image."""
    image: memoryview
    """The bytes of all tensors, as the codec represents them."""
    tensors: list[Tensor]
    """The tensors in the model's dtypes, in the order of the model's tensors."""
    buffer: int
    """The index of the buffer that contains the fetched image or the converted tensors."""


class Receiver:
    """The receiver of weight versions for one engine: it stages a version beside the weights in use, and switches the
    model to it at the commit. One thread may stage while another thread commits."""

    def __init__(self, tensors: Mapping[str, Tensor], codec: Codec, open_inbox: Callable[[int], Inbox]) -> None:
        """Receive versions for ``tensors``, the engine's parameters and buffers by name, represented by ``codec``.
        ``open_inbox`` opens the engine's side of a transport; its argument is the largest size of an update in
        bytes."""
        self._codec = codec
        self._targets = dict(tensors)
        """The tensors of the model, by name."""
        self._devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        """The GPUs on which these tensors are."""
        self._parts = {name: codec.form.parts(name, tensor) for name, tensor in tensors.items()}
        """The shape and dtype of the parts that represent each tensor in an image, by name."""
        self.manifest = plan({name: part for parts in self._parts.values() for name, part in parts.items()})
        self._inbox = open_inbox(self.manifest.total_bytes)
        """The receiving side of the transport."""
        on_devices = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        self._buffers = (
            _VersionBuffer(own={name: tensor.data for name, tensor in on_devices.items()}),
            _VersionBuffer(own={name: torch.empty_like(tensor.data) for name, tensor in on_devices.items()}),
        )
        """The memory for received images."""
        self._lock = threading.Lock()
        """The lock that guards the versions below."""
        self._staged: _ReceivedVersion | None = None
        """The version that is staged; ``None`` if there is none."""
        self._used: _ReceivedVersion | None = None
        """The version that the model uses; ``None`` before the first."""
        self._previous: list[Tensor] = []
        """The tensors of the previous version. They are released during the next staging, since freeing memory takes
        long."""
        self._committing: int | None = None
        """The version whose commit has begun and not ended; ``None`` between commits."""
        self._needs_full = True
        """Whether the next version must be sent whole."""
        self._accepted_manifest: Manifest | None = None
        """The learner's manifest that was compared with the model last; ``None`` before the first."""
        self._accepted_layouts: tuple[RankLayout, ...] = ()
        """The layouts of the ranks that were accepted last; like ``_accepted_manifest``, they are not checked again."""
        self.phase = Phase.NEEDS_FULL
        """The phase of the latest update."""

    @property
    def committed(self) -> int:
        """Return the version in use; −1 before the first commit."""
        return NOT_SAMPLED if self._used is None else self._used.version

    @property
    def address(self) -> str:
        """Return the address to which the learner can send updates; empty for a transport that does not send to
        addresses."""
        return self._inbox.address

    def stage(self, update: WeightUpdate) -> None:
        """Check that ``update`` is newer and fits the model, fetch its payload, and verify the checksums; the version
        can be committed afterwards. This may run in another thread than decoding.

        Raises :class:`~headrace.base.errors.NeedsFull` if the same version could be used when it is sent whole, and
        :class:`~headrace.base.errors.WeightsError` if it could not. The weights in use do not change then.
        """
        try:
            with self._lock:  # no version is staged until the end of this method, so that no commit can begin meanwhile
                self._refuse_unfit(update)
                self._refuse_misaddressed(update)
                base = self._base(update)
                self._staged = None
                previous = self._previous
                self._previous = [] if self._used else [each.data for each in self._targets.values()]
        except WeightsError as refusal:
            self.phase = Phase.NEEDS_FULL if isinstance(refusal, NeedsFull) else Phase.REFUSED
            self._inbox.skip(update)
            raise
        del previous  # outside the lock: freeing memory takes long, and a commit waits for the lock
        self.phase = Phase.STAGED
        try:
            received = self._fetch_version(update, base)
        except BaseException:
            self.phase, self._needs_full = Phase.NEEDS_FULL, True
            raise
        with self._lock:
            self._staged = received
            self.phase = Phase.VERIFIED

    def staged_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the verified version that is not in use yet, by their names in the model; an empty dict
        if there is none."""
        with self._lock:
            return {} if self._staged is None else dict(zip(self._targets, self._staged.tensors, strict=True))

    def commit(self, version: int) -> None:
        """Switch all tensors of the model to the staged ``version``, by a change of pointers; see
        :meth:`commit_parts`."""
        for _ in self.commit_parts(version, 1):
            pass

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Switch the model to the staged ``version`` in ``parts`` steps, one each time the returned iterator is
        advanced. Between two steps the model has some tensors of the old version and some of the new one.

        Raises :class:`~headrace.base.errors.WeightsError` at once if ``version`` is not staged. The next version can be
        staged only after the last step.
        """
        with self._lock:  # another thread may stage the next version at the same time
            staged = self._staged
            if staged is None or staged.version != version:
                reason = "nothing" if staged is None else f"version {staged.version}"
                raise WeightsError(f"commit of version {version}, but {reason} is staged", remedy="stage it first")
            self._staged, self._committing = None, version
        return self._exchange(staged, -(-len(staged.tensors) // parts))

    def close(self) -> None:
        """Close the engine's side of the transport; the model keeps its weights."""
        self._inbox.close()

    def _exchange(self, received: _ReceivedVersion, per_part: int) -> Iterator[None]:
        """Point the model's parameters to the received tensors, ``per_part`` of them between two yields. After the last
        one, record the version as committed."""
        pairs = list(zip(self._targets.values(), received.tensors, strict=True))
        for start in range(0, len(pairs), per_part):
            if start:
                yield
            for tensor, new in pairs[start : start + per_part]:
                tensor.data = new
        with self._lock:
            if self._used is not None:
                self._previous = self._used.tensors
            self._used, self._committing = received, None
            self._needs_full = False
            if self.phase is Phase.VERIFIED and self._staged is None:
                self.phase = Phase.COMMITTED

    def _refuse_unfit(self, update: WeightUpdate) -> None:
        """Raise :class:`~headrace.base.errors.WeightsError` for an update that is not newer than the version in use,
        that arrives during a commit, or that does not fit the model."""
        if update.version <= self.committed:
            raise WeightsError(
                f"version {update.version} is not newer than the committed version {self.committed}",
                remedy="publish versions in order",
            )
        if self._committing is not None:
            raise WeightsError(
                f"version {self._committing} is still coming into use, and version {update.version} needs its place",
                remedy="wait for the commit's report",
            )
        # checked once, since all versions of a run have the same manifest
        if update.manifest != self._accepted_manifest:
            differences = self.manifest.differences(update.manifest)
            if differences:
                raise WeightsError(
                    f"version {update.version} does not fit the engine's model: {'; '.join(differences)}",
                    remedy="give engine and learner the same model directory, dtype and sync.codec",
                )
            _refuse_other_layout(update)
            self._accepted_manifest = update.manifest
            self._accepted_layouts = ()
            for buffer in self._buffers:
                buffer.views = None
        if update.layouts and update.layouts != self._accepted_layouts:
            pieces.refuse_incomplete(update.layouts, update.manifest)
            self._accepted_layouts = update.layouts
        _refuse_inconsistent(update)

    def _refuse_misaddressed(self, update: WeightUpdate) -> None:
        """Raise :class:`~headrace.base.errors.NeedsFull` for an update that the learner has sent only to the addresses
        of other engines."""
        if self.address and self.address not in update.to:
            raise NeedsFull(
                f"version {update.version} was sent to {', '.join(update.to) or 'nobody'}, and this engine is "
                f"{self.address}",
                remedy="send it again, to the engines that are there now",
            )

    def _base(self, update: WeightUpdate) -> memoryview | None:
        """Return the image in use, from which ``update`` is a difference; ``None`` if the update is whole. Raises
        :class:`~headrace.base.errors.NeedsFull` if the engine does not have that image."""
        if update.base is None:
            return None
        used = self._used
        if used is None or self._needs_full or used.version != update.base or used.manifest != update.manifest:
            reason = "an update failed before" if used and self._needs_full else f"version {self.committed} is in use"
            raise NeedsFull(
                f"version {update.version} is a difference from version {update.base}, and {reason}",
                remedy=f"send version {update.version} whole",
            )
        return used.image

    def _fetch_version(self, update: WeightUpdate, base: memoryview | None) -> _ReceivedVersion:
        """Fetch, decode and verify the version of ``update``, and return it with its tensors. ``base`` is the image
        from which it is a difference; ``None`` if it is sent whole."""
        index = 1 if self._used is None else 1 - self._used.buffer
        image = self._inbox.view(update)
        if image is None or base is not None:
            image = self._fetch_image(update, base, image, self._image_buffer(index, update))
        self._verify(update, image)
        with _on_side_streams(self._devices):
            tensors = self._tensors(update.manifest, image, index)
        return _ReceivedVersion(
            version=update.version, manifest=update.manifest, image=image, tensors=tensors, buffer=index
        )

    def _fetch_image(
        self, update: WeightUpdate, base: memoryview | None, payload: memoryview | None, image: memoryview
    ) -> memoryview:
        """Write the image of ``update`` to the memory ``image``, and return it. A whole image is fetched; a difference
        from ``base`` is decoded. ``payload`` is the payload, if it can be viewed in place; ``None``: it is fetched."""
        if base is not None and update.layouts:
            image[:] = base  # the transport applies the differences of each rank in place, bucket by bucket
        if base is None or update.layouts:
            self._inbox.fetch(update, image)
            return image
        if payload is None:
            payload = private_memory(update.num_bytes)
            self._inbox.fetch(update, payload)
        delta.decode(payload, base, image, update.manifest)
        return image

    def _image_buffer(self, index: int, update: WeightUpdate) -> memoryview:
        """Return the memory for an image in the buffer ``index``, which is allocated at its first use."""
        buffer = self._buffers[index]
        if buffer.image is None:
            buffer.image = private_memory(update.manifest.total_bytes)
        return buffer.image

    def _verify(self, update: WeightUpdate, image: memoryview) -> None:
        """Raise :class:`~headrace.base.errors.NeedsFull` if the hash of a tensor in ``image`` differs from the
        announced hash."""
        if update.layouts:
            found = pieces.checksums(image, update.manifest, update.layouts)
        else:
            names = (entry.name for entry in update.manifest.entries)
            found = zip(names, checksums(image, update.manifest), strict=True)
        for (name, actual), expected in zip(found, update.checksums, strict=True):
            if expected != actual:
                raise NeedsFull(
                    f"version {update.version}: tensor {name} hashes to {actual:016x}, announced {expected:016x}",
                    remedy="send the version again, whole: its bytes changed on the way",
                )

    @torch.no_grad()
    def _tensors(self, manifest: Manifest, image: memoryview, index: int) -> list[Tensor]:
        """Return the tensors of ``image``, whose layout is ``manifest``, in the order of the model's tensors. A tensor
        is a view into ``image`` if dtype and device equal the model's; otherwise it is a converted copy in the buffer
        ``index``."""
        tensors = []
        for (name, target), parts in zip(self._targets.items(), self._views(manifest, image, index), strict=True):
            first = parts[0]
            if len(parts) == 1 and first.dtype == target.dtype and first.device == target.device:
                tensors.append(first)
                continue
            if name not in self._buffers[index].own:
                self._buffers[index].own[name] = torch.empty_like(target)
            out = self._buffers[index].own[name]
            self._codec.form.read(parts, out)
            tensors.append(out)
        return tensors

    def _views(self, manifest: Manifest, image: memoryview, index: int) -> list[list[Tensor]]:
        """Return, for each tensor of the model, its parts as views into ``image``. The views are kept in the buffer
        ``index`` if the same memory will be used again."""
        buffer = self._buffers[index]
        if buffer.views is not None and buffer.views[0] is image:
            return buffer.views[1]
        # by name: the learner may list the tensors in another order
        entries = {entry.name: entry for entry in manifest.entries}
        views = [[view(image, entries[part]) for part in parts] for parts in self._parts.values()]
        buffer.views = (image, views) if image is buffer.image or self._inbox.lasting else None
        return views


@contextmanager
def _on_side_streams(devices: Iterable[torch.device]) -> Iterator[None]:
    """Return a context in which copies to the GPUs ``devices`` run on separate CUDA streams, so that the engine's
    passes do not wait for them. The end of the context waits for the copies.

    Each stream starts after the work that is already queued, because a pass may still read the buffer that is to be
    filled.
    """
    with ExitStack() as streams:
        for device in devices:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.default_stream(device))
            streams.callback(stream.synchronize)
            streams.enter_context(torch.cuda.stream(stream))
        yield


def _refuse_other_layout(update: WeightUpdate) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` if the offsets and sizes in the manifest of ``update``, by
    which the image is read, differ from those that :func:`~headrace.sync.manifest.plan` computes for its names, dtypes
    and shapes."""
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


def _refuse_inconsistent(update: WeightUpdate) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` for an update whose slot, number of checksums or number of
    bytes is invalid. These numbers are used as sizes and indices later."""
    manifest = update.manifest
    num_tensors = sum(len(layout.starts) for layout in update.layouts) if update.layouts else len(manifest.entries)
    if update.slot not in range(NUM_SLOTS) or len(update.checksums) != num_tensors:
        raise WeightsError(
            f"version {update.version} is announced in slot {update.slot} of {NUM_SLOTS}, with "
            f"{len(update.checksums)} checksums for {num_tensors} tensors",
            remedy="publish the version again",
        )
    total, whole = manifest.total_bytes, update.base is None
    if not (update.num_bytes == total if whole else 0 <= update.num_bytes < total):
        raise WeightsError(
            f"version {update.version} is announced with {update.num_bytes} bytes, for an image of {total}",
            remedy="publish the version again",
        )
