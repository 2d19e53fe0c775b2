"""The contract of a recurrence: a function of a sequence whose output at a token depends on the tokens before it.

Shape legend: N tokens of the pass, B sequences of a bucket, L their padded length, R sequences with one token each, P
slots of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headrace.models.kernels.ops import Kernels

Tensors = tuple[Tensor, ...]
"""The inputs of a recurrence: tensors with the same first dimensions, which count sequences and tokens."""
Key = tuple[int, int]
"""The name of a state: the index of its layer, and the number of recurrences of that layer before it in a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The size of the state that a recurrence keeps of one sequence."""

    sizes: tuple[int, ...]
    """The dimensions."""
    dtype: torch.dtype
    """The number format."""

    @property
    def num_bytes(self) -> int:
        """Return the size of one sequence's state in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class Recurrence(Protocol):
    """A recurrence with its weights, as one layer calls it in one pass. A plan computes it within each sequence, from
    the sequence's state, which is what the recurrence knows of the tokens so far. A state of zeros is that of no
    tokens."""

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the shape of the state, given the inputs of some tokens."""
        ...

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute several sequences that are padded on the right to the same length, with gradients.

        ``state_B`` is the state before them, ``None`` for zeros. Return the outputs ``[B, L, ...]``, arbitrary where a
        sequence is padded, and the state after the last token of each sequence.
        """
        ...

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Compute one token of each of R sequences, whose states are in ``slots_R`` of the pool, and update the states
        there. Return the outputs ``[R, ...]``. ``ops`` are the compiled kernels, for float32 on a CPU."""
        ...


def inside(lengths_B: Tensor, length: int) -> Tensor:
    """Return which places of padded sequences, of the lengths ``lengths_B`` and padded to ``length``, hold a token:
    ``[B, L]``.

    >>> inside(torch.tensor([1, 2]), 2).tolist()
    [[True, False], [True, True]]
    """
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
