"""What a set of weights looks like in a packed buffer, and the message that a new one is there."""

from __future__ import annotations

import enum

import msgspec

BUCKET_BYTES = 16 << 20
"""What is moved at a time: large enough that no transport is slowed by the number of its messages."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies in the buffer."""

    name: str
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one packed buffer; the same for every version of a run."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int

    def differences(self, other: Manifest) -> list[str]:
        """Every way in which ``other`` does not fit this layout, in words; empty if it fits."""
        mine = {entry.name: entry for entry in self.entries}
        theirs = {entry.name: entry for entry in other.entries}
        lines = [f"{name}: missing" for name in mine if name not in theirs]
        lines += [f"{name}: not a tensor of this model" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            here, there = mine[name], theirs[name]
            if (here.dtype, here.shape) != (there.dtype, there.shape):
                lines.append(f"{name}: {there.dtype}{list(there.shape)}, expected {here.dtype}{list(here.shape)}")
        return sorted(lines)


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One published version: where its bytes are and what they must hash to."""

    version: int
    slot: int
    """Which of the learner's two buffers holds it."""
    path: str
    """Where its bytes are, in the words of the transport: the shared buffers' file, a URL, a group of processes."""
    manifest: Manifest
    """The layout of the image: every tensor as it travels, packed."""
    checksums: tuple[int, ...]
    """xxh3 (64 bits) of each tensor's bytes in the image, in the manifest's order."""
    base: int | None = None
    """The version that the bytes are a difference from; ``None``: they are the image itself."""
    num_bytes: int = 0
    """How many bytes travel; 0 where the image is read where it lies."""
    to: tuple[str, ...] = ()
    """The addresses that it was sent to and has reached, by transports that send to somebody."""
    missed: dict[str, str] = {}
    """The addresses that it was sent to and has not reached, and why."""
    adapter: str = ""
    """What engines that keep several adapters side by side may call this one; empty: it is not an adapter alone."""


class Interrupt(enum.StrEnum):
    """What becomes of the running sequences when new weights are committed."""

    INFLIGHT = "inflight"
    """Between two steps; the cache is kept and they go on."""
    INFLIGHT_RECOMPUTE = "inflight_recompute"
    """Between two steps; their cache is computed again under the new weights, and they go on."""
    STREAM = "stream"
    """Parameter by parameter while decoding goes on; tokens of the transition carry a mixed version."""
    ABORT_RESUME = "abort_resume"
    """They leave the batch, keep their tokens, and queue again in front to go on under the new weights."""
    ABORT_RETRY = "abort_retry"
    """They lose their tokens and begin again under the new weights."""
    DRAIN = "drain"
    """They finish under the old weights; nothing new starts until then."""
    BATCH = "batch"
    """They and all requests already waiting finish under the old weights; later requests wait."""
    SLEEP = "sleep"
    """The engine gives its cache memory back and stands still while the learner has a step to make; after the commit
    they go on as after ``abort_resume``."""


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit cost."""

    version: int
    gap_s: float
    """How long the engine's step loop stood still for it."""
    carried_over: int
    """Sequences that went on under the new weights."""
    restarted: int
    """Sequences that had to begin again."""
    mode: Interrupt = Interrupt.INFLIGHT
    waited_s: float = 0.0
    """From the call to the swap: what draining or streaming took while decoding went on."""
    wasted_tokens: int = 0
    """Sampled tokens that were thrown away."""
    recomputed_tokens: int = 0
    """Cached tokens that have to be computed again."""
