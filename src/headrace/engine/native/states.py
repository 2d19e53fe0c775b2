"""The memory for the states of recurrent layers in the engine: a slot for each sequence of the batch, and snapshots for
prefixes.

    slots:   one for each row ─── one for scoring ─── snapshots, at most engine.state_snapshots
    a pass:  restore (snapshot or parent ──▶ row) ──▶ compute ──▶ save (row ──▶ snapshot)

Another sequence can use the keys and values of a prefix up to any block, but a state cannot be reset to an earlier
token. A prefix is therefore shared only up to a *snapshot*, a copy of the state at the end of a block. A snapshot is
taken at the last block border of each prompt, and of each piece of a long prompt; while a sequence decodes, the
snapshot at its newest border replaces the previous one. The key of a snapshot is the digest of the prefix
(:mod:`headrace.engine.native.blocks`). The digest includes the version, so a commit invalidates snapshots like blocks.
If all slots are used, the snapshot that was used least recently is dropped.

Shape legend: R rows.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.base.types.columns import IntColumn
from headrace.base.types.sampling import Sampling
from headrace.engine.config import EngineConfig
from headrace.engine.native.memory import free_device_bytes
from headrace.engine.native.rows import Index
from headrace.models.kernels.fuse import kernel_dtype
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.recurrent import StatePass, StatePool, state_shapes


class Snapshots:
    """The record of the slot that contains the snapshot of each prefix, by the prefix's digest. ``slots`` are the slots
    for snapshots; the state tensors are in :class:`~headrace.models.recurrent.StatePool`.

    >>> snapshots = Snapshots([7, 8])
    >>> snapshots.plan(b"prompt", 0)
    >>> snapshots.find(b"prompt")  # not before the pass that computes it
    >>> snapshots.pop_planned(), snapshots.find(b"prompt")
    ([(0, 8)], 8)
    """

    def __init__(self, slots: list[int]) -> None:
        """Start without snapshots; all ``slots`` are free."""
        self._free = list(slots)
        self._slots: dict[bytes, int] = {}
        """The slot of each snapshot, by digest, in the order of use: the least recently used first."""
        self._planned: dict[bytes, tuple[int, int]] = {}
        """The pair (row, slot) of each snapshot that the present pass computes, by digest."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, digest: bytes) -> int | None:
        """Return the slot of the snapshot of the prefix ``digest``, and record it as used most recently; ``None`` if
        there is none."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._slots[digest] = slot
        return slot

    def plan(self, digest: bytes, row: int) -> None:
        """Plan to save the state of ``row`` after the next pass as the snapshot of the prefix ``digest``; if no slot is
        free, the snapshot that was used least recently is dropped. Nothing happens if this snapshot exists or is
        planned already, or if there are no slots for snapshots."""
        if digest in self._slots or digest in self._planned or not (self._free or self._slots):
            return
        if not self._free:
            self.drop(next(iter(self._slots)))
        self._planned[digest] = row, self._free.pop()

    def pop_planned(self) -> list[tuple[int, int]]:
        """Return a pair (row, slot) for each planned snapshot, which the caller must save now, after the pass. From now
        on :meth:`find` returns these snapshots."""
        planned, self._planned = self._planned, {}
        self._slots.update({digest: slot for digest, (_, slot) in planned.items()})
        return list(planned.values())

    def drop(self, digest: bytes) -> None:
        """Drop the snapshot of the prefix ``digest``, if there is one, and free its slot."""
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Drop all snapshots, planned ones included, because the weights have changed or the memory is released."""
        self._free += [*self._slots.values(), *(slot for _, slot in self._planned.values())]
        self._slots, self._planned = {}, {}


class SequenceStates:
    """The states of recurrent layers of an engine's sequences: one slot of ``pool`` for each of the ``num_rows`` rows
    of the batch, one slot for scoring, and all further slots for snapshots. The rows notify it when sequences join and
    move (see :class:`headrace.engine.native.rows.Follower`)."""

    def __init__(self, pool: StatePool, num_rows: int) -> None:
        """Divide the slots of ``pool`` among ``num_rows`` rows, scoring and snapshots; no row is in use yet."""
        self._pool = pool
        self.slots_R = np.full(num_rows, -1, np.int64)
        """The slot of each row; −1 for a row that is not in use."""
        self._free = list(range(num_rows))
        """The slots of rows that are not in use."""
        self.scoring_slot = num_rows
        """The slot of a sequence that is scored."""
        self.snapshots = Snapshots(list(range(num_rows + 1, pool.num_slots)))

    @property
    def computed_by(self) -> str:
        """The implementation of the recurrent layers, in words, for the record of the run."""
        return "torch" if self._pool.ops is None else "compiled kernels where sequences decode, torch for prompts"

    @property
    def num_bytes(self) -> int:
        """The memory of all slots, in bytes."""
        return self._pool.num_bytes

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Assign a free slot to ``row``, in which a new sequence begins. The other arguments are not used."""
        self.slots_R[row] = self._free.pop()

    def move(self, sources: Index, targets: Index, count: int) -> None:
        """Assign the slots of the rows ``sources`` to the rows ``targets``, and free the slots of rows that are no
        longer in use; ``count`` rows are in use now."""
        used_slots = set(self.slots_R[self.slots_R >= 0].tolist())
        self.slots_R[targets] = self.slots_R[sources]
        self.slots_R[count:] = -1
        self._free += sorted(used_slots - set(self.slots_R[:count].tolist()))

    def restore(self, copies: list[tuple[int, int]]) -> None:
        """Copy states before a pass, for sequences that begin after a cached prefix: for each pair (slot, row) of
        ``copies``, copy the state in ``slot`` to the slot of ``row``."""
        self._pool.copy([slot for slot, _ in copies], [int(self.slots_R[row]) for _, row in copies])

    def save(self) -> None:
        """Save the snapshots that were planned for the pass that has just been computed."""
        planned = self.snapshots.pop_planned()
        self._pool.copy([int(self.slots_R[row]) for row, _ in planned], [slot for _, slot in planned])

    def make_pass(self, rows_R: Index) -> StatePass:
        """Return the states of the rows ``rows_R``, in that order, for one forward pass, which updates them."""
        return StatePass(self._pool, self.slots_R[rows_R])

    def make_scoring_pass(self) -> StatePass:
        """Return the state of the sequence that is being scored, for one forward pass, which updates it."""
        return StatePass(self._pool, np.array([self.scoring_slot]))

    def release(self) -> None:
        """Free the memory of the states; all states and snapshots are lost."""
        self.snapshots.clear()
        self._pool.release()

    def allocate(self) -> None:
        """Allocate the memory again after :meth:`release`."""
        self._pool.allocate()


def make_states(model: PreTrainedModel, config: EngineConfig) -> SequenceStates | None:
    """Allocate the states of an engine's sequences and return them; ``None`` for a model without recurrent layers.

    Raises :class:`~headrace.base.errors.ConfigError` if there is not enough memory, or if speculation is on, because a
    state that includes a rejected draft cannot be reset to an earlier token.
    """
    shapes = state_shapes(model)
    if not shapes:
        return None
    if config.speculation != "off":
        layers = sorted({layer for layer, _ in shapes})
        raise ConfigError(
            f"engine.speculation={config.speculation!r}: layers {layers} of the model carry a state, which cannot "
            "be turned back where a drafted token is not drawn",
            remedy="leave engine.speculation out, or use a model whose layers only attend",
        )
    num_snapshots = config.max_sequences if config.state_snapshots is None else config.state_snapshots
    num_slots, slot_bytes = config.max_sequences + 1 + num_snapshots, sum(shape.num_bytes for shape in shapes.values())
    free_bytes = free_device_bytes(model.device)
    if num_slots * slot_bytes > free_bytes:
        raise ConfigError(
            f"engine.max_sequences={config.max_sequences} with engine.state_snapshots={num_snapshots} needs "
            f"{num_slots * slot_bytes} bytes for the states of recurrent layers on {model.device}, and "
            f"{free_bytes} are free",
            remedy="lower engine.state_snapshots or engine.max_sequences",
        )
    pool = StatePool(shapes, num_slots, model.device, state_kernels(model, config))
    return SequenceStates(pool, config.max_sequences)


def state_kernels(model: PreTrainedModel, config: EngineConfig) -> Kernels | None:
    """Return the compiled kernels, if they can update the states of the sequences of ``model`` under the settings
    ``config``; else ``None``."""
    usable = config.kernels == "auto" and kernel_dtype(model) == torch.float32
    loaded = kernels() if usable else None
    return loaded if isinstance(loaded, Kernels) else None
