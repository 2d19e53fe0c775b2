"""The gated delta rule of linear attention (Yang et al. 2024, "Gated Delta Networks", eq. 10).

The state S of a head maps keys to values. A token with key k, value v, decay g ≤ 0 and rate β updates it to

    S ← exp(g) · S;   S ← S + k ⊗ β · (v − Sᵀk);   output Sᵀq

Shape legend: B sequences of a bucket, L padded length, R sequences with one token each, G key heads, H value heads, K
size of a key, V size of a value, P slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.models.kernels.ops import Kernels
from headrace.models.recurrent.base import StateShape, Tensors, choose_chunk_size, inside

_EPSILON = 1e-6
"""The constant ε in the norm of queries and keys, as in transformers."""


class DeltaRule:
    """The gated delta rule on queries ``[.., G, K]``, keys ``[.., G, K]``, values ``[.., H, V]``, log decays
    ``[.., H]`` and rates ``[.., H]`` (see :class:`headrace.models.recurrent.base.Recurrence`).
    """

    def __init__(self, reference: Callable[..., Any], chunk_size: int, *, normed: bool) -> None:
        """Store ``reference``, transformers' function that computes sequences in chunks of ``chunk_size`` tokens.
        ``normed`` says whether queries and keys are normalised to length 1 first."""
        self._reference = reference
        self._chunk_size = chunk_size
        self._normed = normed

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the size of the state of one sequence, in float32: heads, size of a key, size of a value."""
        _, key, value, *_ = inputs_N
        return StateShape(sizes=(value.shape[-2], key.shape[-1], value.shape[-1]), dtype=torch.float32)

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the rule for whole sequences, chunk by chunk. Return the outputs and the state after each
        sequence."""
        query, key, value, decay_BLH, rate_BLH = inputs_BL
        length = key.shape[1]
        here_BL1 = inside(lengths_B, length)[:, :, None]
        # padding neither decays the state nor writes into it
        decay_BLH, rate_BLH = decay_BLH.where(here_BL1, 0.0), rate_BLH.where(here_BL1, 0.0)
        out, after = self._reference(
            query, key, value, decay_BLH, rate_BLH, chunk_size=choose_chunk_size(length, self._chunk_size),
            initial_state=state_B, output_final_state=True, use_qk_l2norm_in_kernel=self._normed,
        )  # fmt: skip
        return out, after

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Compute the rule for one new token of each row, update the states in the slots ``slots_R`` of the pool in
        place, and return the outputs ``[R, H, V]``."""
        if ops is not None:
            return ops.delta(inputs_R, normed=self._normed, pool=pool_P, slots_R=slots_R)
        query, key, value, decay_RH, rate_RH = (tensor.float() for tensor in inputs_R)
        if self._normed:
            query, key = _unit_norm(query), _unit_norm(key)
        query = query * query.shape[-1] ** -0.5
        shared = value.shape[1] // key.shape[1]
        query, key = (tensor.repeat_interleave(shared, dim=1) for tensor in (query, key))
        state_RHKV = pool_P.index_select(0, slots_R).mul_(decay_RH.exp()[:, :, None, None])
        found_RHV = torch.matmul(key[:, :, None], state_RHKV)[:, :, 0]
        change_RHV = (value - found_RHV) * rate_RH[:, :, None]
        state_RHKV.addcmul_(key[..., None], change_RHV[:, :, None])
        pool_P.index_copy_(0, slots_R, state_RHKV)
        return torch.matmul(query[:, :, None], state_RHKV)[:, :, 0].to(inputs_R[0].dtype)


def _unit_norm(vectors: Tensor) -> Tensor:
    """Return the vectors divided by their Euclidean norm."""
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + _EPSILON)
