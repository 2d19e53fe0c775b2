"""The memory of recurrent layers in an engine: slots of one sequence each, and the use of them in one pass.

    pool: for each recurrence of each layer a tensor [P, ...]     slot: one index of all these tensors

Shape legend: N tokens of the pass, R rows (sequences of the pass), D rows that decode, F tokens of the other rows, B
rows of a bucket, L their padded length, P slots of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.models.attention import PackedPlan, cut, forward
from headrace.models.config import SUPPORTED
from headrace.models.kernels.ops import Kernels
from headrace.models.recurrent.base import Key, Recurrence, StateShape, Tensors

Index = npt.NDArray[np.int64]
NUM_TOKENS = 2
"""The number of tokens of the pass that :func:`state_shapes` runs."""


class StatePool:
    """The states of ``num_slots`` sequences, for the recurrent layers of an engine's model: zeros at first, and after
    :meth:`allocate`. The engine decides which slot belongs to which sequence."""

    def __init__(
        self,
        shapes: Mapping[Key, StateShape],
        num_slots: int,
        device: torch.device | str,
        ops: Kernels | None = None,
    ) -> None:
        """Allocate ``num_slots`` slots; ``shapes`` are the sizes of the states that a model keeps of one sequence."""
        self.shapes = dict(shapes)
        self.ops = ops
        """The compiled kernels that update the states of sequences that decode; ``None`` for torch."""
        self.num_slots = num_slots
        self._device = device
        self.tensors: dict[Key, Tensor] = {}
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Return the size of all slots in bytes, whether they are allocated or released."""
        return self.num_slots * sum(shape.num_bytes for shape in self.shapes.values())

    def allocate(self) -> None:
        """Allocate the memory, also after a release; its contents are zeros."""
        self.tensors = {
            key: torch.zeros(self.num_slots, *shape.sizes, dtype=shape.dtype, device=self._device)
            for key, shape in self.shapes.items()
        }

    def release(self) -> None:
        """Free the memory; its contents are lost."""
        self.tensors = {}

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states in the slots ``sources`` into the slots ``targets``; no target may be a source of the same
        call."""
        if not len(sources):
            return
        for pool in self.tensors.values():
            pool[list(targets)] = pool[list(sources)]

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """Fill slots with zeros, the state of no tokens."""
        if not len(slots):
            return
        for pool in self.tensors.values():
            pool[list(slots)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaddedRows:
    """Rows of a pass with similar numbers of tokens, padded on the right to be computed in one call."""

    gather_BL: Tensor
    """The index of each token among those of the rows that do not decode; padding repeats the first of its row."""
    lengths_B: Tensor
    """The number of tokens of each row."""
    slots_B: Tensor
    """The slot of each row."""


class StatePass:
    """The recurrences of one engine pass over a pool, for a :class:`~headrace.models.paged.plan.PagedPlan`.

    ``slots_R`` is the slot of each row of the pass. The state of a row that begins at position 0 is cleared first.
    """

    def __init__(self, pool: StatePool, slots_R: Index) -> None:
        """Prepare a pass over ``pool`` whose row r has its states in slot ``slots_R[r]``; :meth:`begin` lays it out."""
        self._pool = pool
        self._slots_R = slots_R
        self.num_decode = 0
        """The number of rows that decode, which come first."""
        self._slots_D: Tensor | None = None
        self._buckets: list[_PaddedRows] = []
        self._place_F: Tensor | None = None

    def begin(self, starts_R: Index, counts_R: Index, num_decode: int, device: torch.device) -> None:
        """Lay out the pass. ``counts_R`` is the number of new tokens of each row, from position ``starts_R`` on; the
        first ``num_decode`` rows have one each."""
        self._pool.clear(self._slots_R[starts_R == 0].tolist())
        self.num_decode = num_decode
        self._slots_D = torch.from_numpy(self._slots_R[:num_decode].copy()).to(device) if num_decode else None
        counts = counts_R[num_decode:]
        begins = np.cumsum(counts) - counts
        place_F, filled = np.empty(int(counts.sum()), np.int64), 0
        for members in cut(counts):
            columns = np.arange(int(counts[members[0]]))
            inside = columns < counts[members][:, None]
            gather = begins[members][:, None] + np.where(inside, columns, 0)
            place_F[gather[inside]] = filled + np.flatnonzero(inside)
            filled += gather.size
            self._buckets.append(
                _PaddedRows(
                    gather_BL=torch.from_numpy(gather).to(device),
                    lengths_B=torch.from_numpy(counts[members]).to(device),
                    slots_B=torch.from_numpy(self._slots_R[num_decode:][members]).to(device),
                )
            )
        if len(self._buckets) > 1 or (self._buckets and filled != len(place_F)):
            self._place_F = torch.from_numpy(place_F).to(device)

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Compute a recurrence over the tokens of the pass, update the states of their sequences, and return its
        outputs ``[N, ...]``. ``key`` names the state."""
        parts = []
        if self._slots_D is not None:
            parts.append(self._decode(recurrence, inputs_N, self._pool.tensors[key], self._slots_D))
        if self._buckets:
            inputs_F = tuple(each[self.num_decode :] for each in inputs_N)
            parts.append(self.recur_prompts(key, recurrence, inputs_F))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode_pools(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pool of a layer's convolution, the pool of its recurrent state, and the slots ``[D]`` of the rows
        that decode, for a kernel that computes a whole mixer and updates both states."""
        assert self._slots_D is not None
        return self._pool.tensors[layer, 0], self._pool.tensors[layer, 1], self._slots_D

    @property
    def prompts(self) -> PromptStates:
        """The states of the rows that do not decode, as the plan of a call over those rows alone."""
        return PromptStates(self)

    def recur_prompts(self, key: Key, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute a recurrence over the F tokens of only those rows that do not decode, and update their states:
        ``[F, ...]``."""
        pool = self._pool.tensors[key]
        found = torch.cat([self._chunk(bucket, pool, recurrence, inputs_F) for bucket in self._buckets])
        return found if self._place_F is None else found.index_select(0, self._place_F)

    def _decode(self, recurrence: Recurrence, inputs_N: Tensors, pool: Tensor, slots_D: Tensor) -> Tensor:
        """Compute a recurrence over the one token of each row that decodes, and update the states: ``[D, ...]``."""
        inputs_D = tuple(each[: self.num_decode] for each in inputs_N)
        return recurrence.decode(inputs_D, pool, slots_D, self._pool.ops)

    def _chunk(self, bucket: _PaddedRows, pool: Tensor, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute the sequences of one bucket with their states, and return the outputs of all its places."""
        inputs_BL = tuple(each[bucket.gather_BL] for each in inputs_F)
        out, after = recurrence.chunk(inputs_BL, bucket.lengths_B, pool.index_select(0, bucket.slots_B))
        pool.index_copy_(0, bucket.slots_B, after.to(pool.dtype))
        return out.flatten(0, 1)


class PromptStates:
    """The recurrences of those rows of a pass that do not decode, in the place of a plan in a mixer's call over their
    tokens alone."""

    def __init__(self, states: StatePass) -> None:
        """Take the rows that do not decode from ``states``, the states of the whole pass."""
        self._states = states

    def recur(self, key: Key, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute a recurrence over the F tokens of these rows, update their states, and return its outputs ``[F,
        ...]``."""
        return self._states.recur_prompts(key, recurrence, inputs_F)


class _StateRecorder(PackedPlan):
    """A plan that records the shape of every state in a short pass, for :func:`state_shapes`."""

    def __init__(self, device: torch.device) -> None:
        """Lay out one short sequence on ``device``."""
        super().__init__([NUM_TOKENS], device)
        self.shapes: dict[Key, StateShape] = {}
        self.twice: set[int] = set()

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Record the shape of the recurrence's state, and whether its layer has called it more than once, then compute
        it."""
        if key in self.shapes:
            self.twice.add(key[0])
        self.shapes[key] = recurrence.shape(inputs_N)
        return super().recur(key, recurrence, inputs_N)


@torch.inference_mode()
def state_shapes(model: nn.Module) -> dict[Key, StateShape]:
    """Return the shape of every state that a model keeps of a sequence; none for a model that only attends.

    Raises :class:`~headrace.base.errors.ModelError` if two mixers have the same layer index.
    """
    device = next(model.parameters()).device
    watch = _StateRecorder(device)
    forward(model, torch.zeros(NUM_TOKENS, dtype=torch.long, device=device), watch)
    if watch.twice:
        raise ModelError(
            f"a {type(model).__name__} has several recurrent mixers in layers {sorted(watch.twice)}", remedy=SUPPORTED
        )
    return watch.shapes
