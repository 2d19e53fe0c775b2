"""The interface of a recurrence: a function of a sequence whose output at a token depends on the tokens before it.

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
"""The inputs of a recurrence: tensors with the same leading dimensions, for sequences and tokens."""
Key = tuple[int, int]
"""The identifier of a state: the index of its layer, and the index of the recurrence among those of the layer."""
_SMALLEST_CHUNK = 16
"""The smallest chunk size, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The size of the state that a recurrence stores for one sequence."""

    sizes: tuple[int, ...]
    """The dimensions of the state."""
    dtype: torch.dtype
    """The number format of the state."""

    @property
    def num_bytes(self) -> int:
        """Return the size of one sequence's state in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


class Recurrence(Protocol):
    """A recurrence with its weights, as one layer calls it in one pass. A plan computes it within each sequence,
    starting from the sequence's state, which summarises the tokens so far. The state before the first token is
    zeros."""

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the shape of the state, given the inputs of any tokens."""
        ...

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute several sequences, with the inputs ``inputs_BL``, that are padded on the right to the same length,
        with gradients.

        ``state_B`` is the state before each sequence; ``None`` for zeros. Return the outputs ``[B, L, ...]``, which are
        arbitrary in padding, and the state after the last token of each sequence.
        """
        ...

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Compute one token, with the inputs ``inputs_R``, of each of R sequences, whose states are in the slots
        ``slots_R`` of the pool ``pool_P``, and update the states in place. Return the outputs ``[R, ...]``. ``ops`` are
        the compiled kernels, for float32 on a CPU."""
        ...


def inside(lengths_B: Tensor, length: int) -> Tensor:
    """Return, as ``[B, L]`` bool, whether each position of sequences with the lengths ``lengths_B``, padded to
    ``length``, is a token and not padding.

    >>> inside(torch.tensor([1, 2]), 2).tolist()
    [[True, False], [True, True]]
    """
    return torch.arange(length, device=lengths_B.device) < lengths_B[:, None]


def choose_chunk_size(length: int, largest: int) -> int:
    """Return the chunk size, at most ``largest``, with which to compute sequences of ``length`` tokens. Every chunk is
    computed completely, so that short sequences need small chunks.

    >>> [choose_chunk_size(length, 64) for length in (100, 20, 1)]
    [64, 32, 16]
    """
    size = largest
    while size > _SMALLEST_CHUNK and size >= 2 * length:
        size //= 2
    return size
