"""The layout of weights in a packed buffer, and the message that a new version is published. The *image* of a version
is the packed buffer with all tensors of that version."""

from __future__ import annotations

import enum

import msgspec

NUM_SLOTS = 2
"""The number of the learner's buffers for published versions: engines read one buffer while the learner writes the
other."""
BUCKET_BYTES = 16 << 20
"""The size of the pieces in which weights are transferred, in bytes. It is large enough that the number of messages
does not slow any transport."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The name, type, shape and position of one tensor in the packed buffer."""

    name: str
    dtype: str
    """The name of the dtype in torch without its prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]
    offset_bytes: int
    """The offset of the tensor's first byte in the buffer."""
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of the buffer that contains all tensors. It is the same for every version of a run."""

    entries: tuple[TensorEntry, ...]
    """The tensors, in the order of their offsets."""
    total_bytes: int
    """The size of the buffer in bytes."""

    def differences(self, other: Manifest) -> list[str]:
        """Return the differences between this layout and ``other`` in names, types and shapes, one line each; empty if
        the tensors of ``other`` fit this layout."""
        own = {entry.name: entry for entry in self.entries}
        others = {entry.name: entry for entry in other.entries}
        lines = [f"{name}: missing" for name in own if name not in others]
        lines += [f"{name}: not a tensor of this model" for name in others if name not in own]
        for name in own.keys() & others.keys():
            expected, actual = own[name], others[name]
            if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
                lines.append(
                    f"{name}: {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
                )
        return sorted(lines)


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The data that one rank of a learner sends of every version: *pieces*, which are boxes of the image's tensors,
    packed consecutively. A box is the part of a tensor between two indices of every axis."""

    pieces: Manifest
    """The layout of the packed pieces. Each piece has the name and the dtype of its tensor in the image, and the shape
    of its box."""
    starts: tuple[tuple[int, ...], ...]
    """For each piece, the index along each axis of the tensor at which its box begins."""


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One published version of the weights: the location of its bytes, and their checksums. The learner sends this
    record, and an engine stages the version with it."""

    version: int
    """The version that is published."""
    slot: int
    """The index of the learner's buffer that contains the version."""
    path: str
    """The location of the bytes, which depends on the transport: the file of the shared buffers, a URL, a group of
    processes."""
    manifest: Manifest
    """The layout of the image, the buffer that contains all tensors."""
    checksums: tuple[int, ...]
    """xxh3 (64 bits) of each tensor's bytes in the image, in the manifest's order; with :attr:`layouts`, of the bytes
    of each piece, rank after rank."""
    layouts: tuple[RankLayout, ...] = ()
    """The data that each rank of the learner sends, if every rank sends its own part of the weights. Empty if one
    sender sends the whole image."""
    base: int | None = None
    """The version to which the bytes are a difference; ``None`` if they are the full image."""
    num_bytes: int = 0
    """The number of bytes that are transferred; 0 if the engine reads the image in place."""
    to: tuple[str, ...] = ()
    """The addresses that have received the version, for transports that send it to each receiver."""
    missed_by: dict[str, str] = {}
    """The addresses that have not received the version, each with the reason."""
    note: str = ""
    """A note for the user about the transport of the bytes, as a sentence: that another way of transport is used now,
    and why. The controller logs it as a warning."""
    announced_to: tuple[str, ...] = ()
    """The engines to which the learner itself has announced the version, by their addresses for orders. The
    controller does not order these engines to stage it."""
    adapter: str = ""
    """The name of the adapter, for engines that contain several adapters; empty if the update is not only an
    adapter."""


class Interrupt(enum.StrEnum):
    """The treatment of an engine's running sequences when new weights are committed."""

    INFLIGHT = "inflight"
    """The weights change between two steps; sequences keep their cache and continue."""
    INFLIGHT_RECOMPUTE = "inflight_recompute"
    """The weights change between two steps; sequences continue after their cache is computed again with the new
    weights."""
    STREAM = "stream"
    """The weights change parameter by parameter while decoding continues; tokens of the transition have a mixed
    version."""
    ABORT_RESUME = "abort_resume"
    """The sequences leave the batch, keep their tokens, and continue with the new weights from the front of the
    queue."""
    ABORT_RETRY = "abort_retry"
    """The sequences lose their tokens and restart with the new weights."""
    DRAIN = "drain"
    """The sequences finish with the old weights; no new sequence starts until then."""
    BATCH = "batch"
    """The sequences, and all requests that are already waiting, finish with the old weights; later requests wait."""
    SLEEP = "sleep"
    """The engine frees its cache and stops while the learner makes a step; after the commit, sequences continue as with
    ``abort_resume``."""

    @property
    def stops_generation(self) -> bool:
        """Whether an engine stops sampling for a commit. All engines commit at once if it does not, unless
        ``sync.rolling`` is set."""
        return self not in (Interrupt.INFLIGHT, Interrupt.STREAM)


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of one commit in an engine."""

    version: int
    """The version that was committed."""
    gap_s: float
    """How long the engine's step loop was stopped for the commit, in seconds."""
    carried_over: int
    """The number of sequences that continued under the new weights."""
    restarted: int
    """The number of sequences that had to restart."""
    mode: Interrupt = Interrupt.INFLIGHT
    """The treatment of running sequences."""
    waited_s: float = 0.0
    """Seconds from the order to the change of weights: the time that draining or streaming took while decoding
    continued."""
    wasted_tokens: int = 0
    """The number of sampled tokens that were discarded."""
    recomputed_tokens: int = 0
    """The number of cached tokens that have to be computed again."""
