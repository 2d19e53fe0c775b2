"""What a set of weights looks like in a packed buffer, and the message that a new one is there."""

from __future__ import annotations

import msgspec


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
    """Which of the two shared buffers holds it."""
    path: str
    """The shared buffers' file."""
    manifest: Manifest
    checksums: tuple[int, ...]
    """xxh3 (64 bits) of each tensor's bytes, in the manifest's order."""


class SwapReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit cost."""

    version: int
    gap_s: float
    """How long the engine's step loop stood still for it."""
    carried_over: int
    """Sequences that went on under the new weights."""
    restarted: int
    """Sequences that had to begin again."""
