"""The layout of weights in a packed buffer, and the message that a new version is published. The *image* of a version
is the content of that buffer: the bytes of all tensors."""

from __future__ import annotations

import enum

import msgspec

NUM_SLOTS = 2
"""The number of the learner's buffers for published versions: the engines read one while the learner fills the
other."""
BUCKET_BYTES = 16 << 20
"""The size of the pieces in which weights are moved, in bytes: large enough that the number of messages slows no
transport."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The name, type, shape and place of one tensor in the packed buffer."""

    name: str
    dtype: str
    """The name of the dtype in torch without its prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]
    offset_bytes: int
    """The index of its first byte in the buffer."""
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of the buffer in which all tensors are packed. It is the same for every version of a run."""

    entries: tuple[TensorEntry, ...]
    """The tensors, in the order of their places."""
    total_bytes: int
    """The size of the buffer."""

    def differences(self, other: Manifest) -> list[str]:
        """Return every way in which the layout ``other`` differs from this one in names, types and shapes, in words;
        empty if its tensors fit."""
        mine = {entry.name: entry for entry in self.entries}
        theirs = {entry.name: entry for entry in other.entries}
        lines = [f"{name}: missing" for name in mine if name not in theirs]
        lines += [f"{name}: not a tensor of this model" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            here, there = mine[name], theirs[name]
            if (here.dtype, here.shape) != (there.dtype, there.shape):
                lines.append(f"{name}: {there.dtype}{list(there.shape)}, expected {here.dtype}{list(here.shape)}")
        return sorted(lines)


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a learner sends of every version: *pieces*, which are boxes of the tensors in the image, packed
    one after the other. A piece of an image's matrix may be some of its rows, or some of its columns."""

    pieces: Manifest
    """The pieces as they are packed. Each has the name and the dtype of its tensor in the image, and the shape of the
    box."""
    starts: tuple[tuple[int, ...], ...]
    """For each piece the index, along each axis of its tensor, at which the box begins."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One published version of the weights: where its bytes are, and the checksums that they must have. The learner
    makes it, and engines stage the version by it."""

    version: int
    """The version that is published."""
    slot: int
    """The index of the learner's buffer that contains the version."""
    path: str
    """The location of the bytes, in a form that depends on the transport: the file of the shared buffers, a URL, a
    group of processes."""
    manifest: Manifest
    """The layout of the image, in which all tensors are packed."""
    checksums: tuple[int, ...]
    """xxh3 (64 bits) of each tensor's bytes in the image, in the manifest's order; with :attr:`layouts`, of the bytes
    of each piece, rank after rank."""
    layouts: tuple[RankLayout, ...] = ()
    """What each rank of the learner sends, if every rank sends the part of the weights that it holds. Empty: one sender
    sends the whole image."""
    base: int | None = None
    """The version that the bytes are a difference to; ``None`` if they are the full image."""
    num_bytes: int = 0
    """The number of bytes that are transferred; 0 if the engine reads the image in place."""
    to: tuple[str, ...] = ()
    """The addresses that have received the version, for transports that send it to each receiver."""
    missed: dict[str, str] = {}
    """The addresses that have not received the version, with the reason."""
    note: str = ""
    """What the user has to know about the way that the bytes take, as a sentence: that the transport has changed to
    another way, and why. The controller warns with it."""
    announced_to: tuple[str, ...] = ()
    """The engines to which the learner itself has announced the version, by their addresses for orders. The
    controller does not order these to stage it."""
    adapter: str = ""
    """The name of the adapter for engines that hold several adapters; empty if the version is not an adapter alone."""


class Interrupt(enum.StrEnum):
    """What happens to running sequences of an engine when new weights are committed."""

    INFLIGHT = "inflight"
    """The weights change between two steps; sequences keep their cache and continue."""
    INFLIGHT_RECOMPUTE = "inflight_recompute"
    """The weights change between two steps; sequences continue after their cache is computed again under the new
    weights."""
    STREAM = "stream"
    """The weights change parameter by parameter while decoding continues; tokens of the transition have a mixed
    version."""
    ABORT_RESUME = "abort_resume"
    """The sequences leave the batch, keep their tokens, and continue under the new weights from the front of the
    queue."""
    ABORT_RETRY = "abort_retry"
    """The sequences lose their tokens and begin again under the new weights."""
    DRAIN = "drain"
    """The sequences finish under the old weights; nothing new starts until then."""
    BATCH = "batch"
    """The sequences, and all requests already waiting, finish under the old weights; later requests wait."""
    SLEEP = "sleep"
    """The engine frees its cache and stands still while the learner makes a step; after the commit, sequences
    continue as with ``abort_resume``."""


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one commit in an engine."""

    version: int
    """The version that was committed."""
    gap_s: float
    """How long the engine's step loop stood still for the commit, in seconds."""
    carried_over: int
    """The number of sequences that continued under the new weights."""
    restarted: int
    """The number of sequences that had to begin again."""
    mode: Interrupt = Interrupt.INFLIGHT
    """How running sequences were treated."""
    waited_s: float = 0.0
    """Seconds from the call to the change of weights: the time that draining or streaming took while decoding
    continued."""
    wasted_tokens: int = 0
    """The number of sampled tokens that were discarded."""
    recomputed_tokens: int = 0
    """The number of cached tokens that have to be computed again."""
