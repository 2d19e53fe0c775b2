"""The selective state space of Mamba (Gu and Dao 2023, "Mamba", algorithm 2).

The state h of a channel consists of S numbers, each with its own decay. A token with input x, step Δ and vectors B and
C updates it to

    h ← exp(Δ · A) · h + Δ · x · B;   output h · C

Shape legend: B sequences of a bucket, L padded length, R sequences with one token each, E channels, S numbers of a
channel's state, P slots of a pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.kernels.ops import Kernels
from headrace.models.recurrent.base import StateShape, Tensors, inside


class Selective:
    """The state space on inputs ``[.., E]``, steps ``[.., E]`` (after bias and softplus), and B and C ``[.., S]`` (see
    :class:`headrace.models.recurrent.base.Recurrence`). A sequence is computed token by token, as in transformers.
    """

    def __init__(self, rate_ES: Tensor) -> None:
        """Store A as ``rate_ES``. It is negative: its product with a step is the logarithm of a decay."""
        self._rate_ES = rate_ES

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the size (E, S) of the state of one sequence, in float32."""
        return StateShape(sizes=tuple(self._rate_ES.shape), dtype=torch.float32)

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute whole sequences, token by token. Return the outputs and the state after each sequence."""
        x_BLE, step_BLE, into_BLS, from_BLS = (tensor.float() for tensor in inputs_BL)
        length = x_BLE.shape[1]
        # a step of 0 neither decays the state nor writes into it
        step_BLE = step_BLE.where(inside(lengths_B, length)[:, :, None], 0.0)
        added_BLE = step_BLE * x_BLE
        state_BES = x_BLE.new_zeros(len(x_BLE), *self._rate_ES.shape) if state_B is None else state_B
        outputs = []
        for place in range(length):  # the states of all tokens at once would need S times the memory of the inputs
            kept_BES = (step_BLE[:, place, :, None] * self._rate_ES).exp()
            state_BES = kept_BES * state_BES + added_BLE[:, place, :, None] * into_BLS[:, place, None]
            outputs.append(torch.matmul(state_BES, from_BLS[:, place, :, None])[..., 0])
        return torch.stack(outputs, 1).to(inputs_BL[0].dtype), state_BES

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Compute one new token of each row, update the states in the slots ``slots_R`` of the pool in place, and
        return the outputs ``[R, E]``."""
        if ops is not None:
            return ops.select(inputs_R, self._rate_ES, pool=pool_P, slots_R=slots_R)
        x_RE, step_RE, into_RS, from_RS = (tensor.float() for tensor in inputs_R)
        state_RES = pool_P.index_select(0, slots_R).mul_((step_RE[..., None] * self._rate_ES).exp())
        state_RES.addcmul_((step_RE * x_RE)[..., None], into_RS[:, None])
        pool_P.index_copy_(0, slots_R, state_RES)
        return torch.matmul(state_RES, from_RS[..., None])[..., 0].to(inputs_R[0].dtype)
