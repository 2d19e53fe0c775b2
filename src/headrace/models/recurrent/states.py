"""The states of recurrent layers in an engine: a pool of slots, each for one sequence, and its use in one pass.

    pool: for each recurrence of each layer, a tensor [P, ...]     slot: an index into the first dimension of all
    tensors

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
from headrace.models.attention import PackedPlan, bucket_by_length, forward
from headrace.models.config import SUPPORTED
from headrace.models.kernels.ops import Kernels
from headrace.models.padding import gather_rows
from headrace.models.recurrent.base import Key, Recurrence, StateShape, Tensors

Index = npt.NDArray[np.int64]
NUM_TOKENS = 2
"""The number of tokens of the pass in :func:`state_shapes`."""


class StatePool:
    """The states of ``num_slots`` sequences, for the recurrent layers of an engine's model. They are zeros at first and
    after :meth:`allocate`. The engine assigns slots to sequences."""

    def __init__(
        self,
        shapes: Mapping[Key, StateShape],
        num_slots: int,
        device: torch.device | str,
        ops: Kernels | None = None,
    ) -> None:
        """Allocate ``num_slots`` slots on ``device``. ``shapes`` are the sizes of the states of one sequence, and
        ``ops`` are the kernels that update states (``None``: torch does)."""
        self.shapes = dict(shapes)
        self.ops = ops
        """The compiled kernels that update the states of decoding sequences; ``None``: torch updates them."""
        self.num_slots = num_slots
        self._device = device
        self.tensors: dict[Key, Tensor] = {}
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Return the size of all slots in bytes, also while they are released."""
        return self.num_slots * sum(shape.num_bytes for shape in self.shapes.values())

    def allocate(self) -> None:
        """Allocate the memory, which may have been released before; its content is zeros."""
        self.tensors = {
            key: torch.zeros(self.num_slots, *shape.sizes, dtype=shape.dtype, device=self._device)
            for key, shape in self.shapes.items()
        }

    def release(self) -> None:
        """Free the memory; its content is lost."""
        self.tensors = {}

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states in the slots ``sources`` into the slots ``targets``. No target may also be a source."""
        if not len(sources):
            return
        for pool in self.tensors.values():
            pool[list(targets)] = pool[list(sources)]

    @torch.inference_mode()
    def clear(self, slots: Sequence[int]) -> None:
        """Fill slots with zeros, the state before the first token."""
        if not len(slots):
            return
        for pool in self.tensors.values():
            pool[list(slots)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaddedRows:
    """Rows of a pass with similar numbers of tokens, padded on the right for one call."""

    gather_BL: Tensor
    """The index of each token among the tokens of the rows that do not decode; padding repeats the row's first
    token."""
    lengths_B: Tensor
    """The number of tokens of each row."""
    slots_B: Tensor
    """The slot of each row."""


class StatePass:
    """The use of a pool in one forward pass of the engine: it reads the states of the pass's rows from their slots,
    runs the recurrences of all recurrent layers, and writes the new states back. The
    :class:`~headrace.models.paged.plan.PagedPlan` of the pass, which computes attention, owns it."""

    def __init__(self, pool: StatePool, slots_R: Index) -> None:
        """Prepare a pass whose row r has its states in slot ``slots_R[r]`` of ``pool``. :meth:`begin` must be called
        before any recurrence is computed."""
        self._pool = pool
        self._slots_R = slots_R
        self.num_decode = 0
        """The number of decoding rows, which come first."""
        self._slots_D: Tensor | None = None
        """The slot of each decoding row; ``None`` without such rows."""
        self._buckets: list[_PaddedRows] = []
        """The other rows in buckets of similar length."""
        self._place_F: Tensor | None = None
        """The index of each token of the other rows in the concatenated outputs of all buckets; ``None`` if they are in
        order."""

    def begin(self, starts_R: Index, counts_R: Index, num_decode: int, device: torch.device) -> None:
        """Set the layout of the pass, and clear the states of rows that start at position 0. ``counts_R`` is the number
        of new tokens of each row, from position ``starts_R`` on; the first ``num_decode`` rows have one token each. The
        other rows are computed in buckets of similar length. Index tensors are on ``device``."""
        self._pool.clear(self._slots_R[starts_R == 0].tolist())
        self.num_decode = num_decode
        self._slots_D = torch.from_numpy(self._slots_R[:num_decode].copy()).to(device) if num_decode else None
        counts = counts_R[num_decode:]
        begins = np.cumsum(counts) - counts
        # place_F: the index of each token in the concatenated outputs of all buckets
        place_F, filled = np.empty(int(counts.sum()), np.int64), 0
        for members in bucket_by_length(counts):
            gather = gather_rows(begins[members], counts[members], place_F, filled)
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
        """Compute a recurrence over the tokens of the pass, update the states of the sequences, and return the outputs
        ``[N, ...]``. ``key`` identifies the state."""
        parts = []
        if self._slots_D is not None:
            parts.append(self._decode(recurrence, inputs_N, self._pool.tensors[key], self._slots_D))
        if self._buckets:
            inputs_F = tuple(each[self.num_decode :] for each in inputs_N)
            parts.append(self.recur_prompts(key, recurrence, inputs_F))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode_pools(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pool of a layer's convolution, the pool of its recurrent state, and the slots ``[D]`` of the
        decoding rows, for a kernel that computes a whole mixer and updates both states."""
        assert self._slots_D is not None
        return self._pool.tensors[layer, 0], self._pool.tensors[layer, 1], self._slots_D

    @property
    def prompts(self) -> PromptStates:
        """Return a view of this pass without the decoding rows. A layer that computes decoding rows by a kernel of its
        own passes the view, in place of the plan, to the call for the other rows."""
        return PromptStates(self)

    def recur_prompts(self, key: Key, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute a recurrence over the F tokens of the rows that do not decode, update their states, and return the
        outputs ``[F, ...]``."""
        pool = self._pool.tensors[key]
        found = torch.cat([self._chunk(bucket, pool, recurrence, inputs_F) for bucket in self._buckets])
        return found if self._place_F is None else found.index_select(0, self._place_F)

    def _decode(self, recurrence: Recurrence, inputs_N: Tensors, pool: Tensor, slots_D: Tensor) -> Tensor:
        """Compute a recurrence over the single token of each decoding row, update the states, and return ``[D,
        ...]``."""
        inputs_D = tuple(each[: self.num_decode] for each in inputs_N)
        return recurrence.decode(inputs_D, pool, slots_D, self._pool.ops)

    def _chunk(self, bucket: _PaddedRows, pool: Tensor, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute the sequences of one bucket from their states, update the states, and return the outputs of all
        positions of the bucket, padding included."""
        inputs_BL = tuple(each[bucket.gather_BL] for each in inputs_F)
        out, after = recurrence.chunk(inputs_BL, bucket.lengths_B, pool.index_select(0, bucket.slots_B))
        pool.index_copy_(0, bucket.slots_B, after.to(pool.dtype))
        return out.flatten(0, 1)


class PromptStates:
    """The recurrences of the rows of a pass that do not decode. A mixer's call over only the tokens of these rows uses
    this object as its plan."""

    def __init__(self, states: StatePass) -> None:
        """Store ``states``, the states of the whole pass."""
        self._states = states

    def recur(self, key: Key, recurrence: Recurrence, inputs_F: Tensors) -> Tensor:
        """Compute a recurrence over the F tokens of these rows, update their states, and return the outputs
        ``[F, ...]``."""
        return self._states.recur_prompts(key, recurrence, inputs_F)


class _StateRecorder(PackedPlan):
    """A plan that records the shape of every state in a short pass, for :func:`state_shapes`."""

    def __init__(self, device: torch.device) -> None:
        """Arrange one short sequence on ``device``."""
        super().__init__([NUM_TOKENS], device)
        self.shapes: dict[Key, StateShape] = {}
        self.twice: set[int] = set()
        """The layers in which the same state was recorded more than once."""

    def recur(self, key: Key, recurrence: Recurrence, inputs_N: Tensors) -> Tensor:
        """Record the shape of the recurrence's state, and whether its layer has used this state before, then compute
        the recurrence."""
        if key in self.shapes:
            self.twice.add(key[0])
        self.shapes[key] = recurrence.shape(inputs_N)
        return super().recur(key, recurrence, inputs_N)


@torch.inference_mode()
def state_shapes(model: nn.Module) -> dict[Key, StateShape]:
    """Return the shape of every state that a model has for a sequence; empty for a model without recurrent layers.

    Raises :class:`~headrace.base.errors.ModelError` if two mixers have the same layer index.
    """
    device = next(model.parameters()).device
    recorder = _StateRecorder(device)
    forward(model, torch.zeros(NUM_TOKENS, dtype=torch.long, device=device), recorder)
    if recorder.twice:
        raise ModelError(
            f"a {type(model).__name__} has several recurrent mixers in layers {sorted(recorder.twice)}",
            remedy=SUPPORTED,
        )
    return recorder.shapes
