"""The selective state space of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 2).

The state h of a head consists of S numbers for each of its E channels. A token with input x, step Δ and vectors B and C
updates it to

    h ← exp(Δ · A) · h + Δ · x ⊗ B;   output h · C + D · x

Shape legend: B sequences of a bucket, L padded length, R sequences with one token each, H heads, E channels of a head,
G groups, S numbers of a channel's state, P slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.models.kernels.ops import Kernels
from headrace.models.recurrent.base import StateShape, Tensors, choose_chunk_size, inside


class StateSpace:
    """The state space on inputs ``[.., H, E]``, steps ``[.., H]`` (after bias, softplus and limits), and B and C
    ``[.., G, S]`` (see :class:`headrace.models.recurrent.base.Recurrence`).
    """

    def __init__(
        self, reference: Callable[..., Any], chunk_size: int, *, rate_H: Tensor, skip_H: Tensor | None
    ) -> None:
        """Store A as ``rate_H`` and D as ``skip_H`` (``None`` for none). ``reference`` is transformers' function that
        computes sequences in chunks of ``chunk_size`` tokens."""
        self._reference = reference
        self._chunk_size = chunk_size
        self._rate_H = rate_H
        self._skip_H = skip_H

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the size (H, E, S) of the state of one sequence, in float32."""
        x, _, key, _ = inputs_N
        return StateShape(sizes=(*x.shape[-2:], key.shape[-1]), dtype=torch.float32)

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute whole sequences, chunk by chunk. Return the outputs and the state after each sequence."""
        x_BLHE, step_BLH, into_BLGS, from_BLGS = inputs_BL
        length = x_BLHE.shape[1]
        # a step of 0 neither decays the state nor writes into it
        step_BLH = step_BLH.where(inside(lengths_B, length)[:, :, None], 0.0)
        out, after = self._reference(
            x_BLHE, step_BLH, self._rate_H, into_BLGS, from_BLGS,
            chunk_size=choose_chunk_size(length, self._chunk_size),
            D=self._skip_H, initial_states=state_B, return_final_states=True,
        )  # fmt: skip
        return out, after

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Compute one new token of each row, update the states in the slots ``slots_R`` of the pool in place, and
        return the outputs ``[R, H, E]``. ``inputs_R`` are x, Δ, B and C of each row."""
        if ops is not None:
            return ops.scan(inputs_R, self._rate_H, self._skip_H, pool=pool_P, slots_R=slots_R)
        x_RHE, step_RH, into_RGS, from_RGS = (tensor.float() for tensor in inputs_R)
        shared = x_RHE.shape[1] // into_RGS.shape[1]
        into_RHS, from_RHS = (tensor.repeat_interleave(shared, dim=1) for tensor in (into_RGS, from_RGS))
        state_RHES = pool_P.index_select(0, slots_R).mul_((step_RH * self._rate_H.float()).exp()[:, :, None, None])
        state_RHES.addcmul_((x_RHE * step_RH[:, :, None])[..., None], into_RHS[:, :, None])
        pool_P.index_copy_(0, slots_R, state_RHES)
        out_RHE = torch.matmul(state_RHES, from_RHS[..., None])[..., 0]
        return out_RHE if self._skip_H is None else out_RHE + x_RHE * self._skip_H[:, None]
