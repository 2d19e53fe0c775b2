"""The causal convolution over the last few tokens, channel by channel; its state is the window before the next token.

Shape legend: B sequences of a bucket, L padded length, R sequences with one token each, C channels, W weights of a
channel, P slots of a pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from headrace.models.kernels.ops import WIDEST, Kernels
from headrace.models.recurrent.base import StateShape, Tensors


class Convolution:
    """A depthwise convolution with its activation (see :class:`headrace.models.recurrent.base.Recurrence`). Its input
    is one tensor of C channels."""

    def __init__(self, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None) -> None:
        """Store the weights and the bias of the convolution. ``activation`` is transformers' name of the activation
        after it; ``None`` for none."""
        self._weight_CW = weight_CW
        self._bias_C = bias_C
        self._activation = activation
        self._activate: Callable[[Tensor], Tensor] = torch.nn.Identity() if activation is None else ACT2FN[activation]
        """The activation as a function."""

    def shape(self, inputs_N: Tensors) -> StateShape:
        """Return the size of the state: for every channel, the previous inputs that the filter still needs."""
        channels, width = self._weight_CW.shape
        return StateShape(sizes=(channels, width - 1), dtype=inputs_N[0].dtype)

    def chunk(self, inputs_BL: Tensors, lengths_B: Tensor, state_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Convolve whole sequences that are padded to the same length. Return the outputs ``[B, L, C]`` and the state
        after each sequence, its last inputs."""
        now_BCL = inputs_BL[0].transpose(1, 2)
        width = self._weight_CW.shape[1]
        before_BCW = now_BCL.new_zeros(*now_BCL.shape[:2], width - 1) if state_B is None else state_B.to(now_BCL)
        seen_BCL = torch.cat([before_BCW, now_BCL], dim=-1)
        out_BCL = F.conv1d(
            seen_BCL.to(self._weight_CW.dtype), self._weight_CW[:, None], self._bias_C, groups=now_BCL.shape[1]
        )
        # the state: the last width - 1 inputs up to the end of each sequence
        places_BW = lengths_B[:, None] + torch.arange(width - 1, device=lengths_B.device)
        after_BCW = seen_BCL.gather(2, places_BW[:, None].expand(-1, now_BCL.shape[1], -1))
        return self._activate(out_BCL).to(now_BCL.dtype).transpose(1, 2), after_BCW

    def decode(self, inputs_R: Tensors, pool_P: Tensor, slots_R: Tensor, ops: Kernels | None = None) -> Tensor:
        """Convolve one new token of each row, update the states in the slots ``slots_R`` of the pool in place, and
        return the outputs ``[R, C]``."""
        narrow = self._weight_CW.shape[1] <= WIDEST
        if ops is not None and narrow and self._activation in ("silu", "swish", None):
            silu = self._activation is not None
            return ops.convolve(
                inputs_R[0], self._weight_CW, self._bias_C, silu=silu, pool=pool_P, slots_R=slots_R
            )  # fmt: skip
        seen_RCW = torch.cat([pool_P.index_select(0, slots_R), inputs_R[0][:, :, None]], dim=-1)
        pool_P.index_copy_(0, slots_R, seen_RCW[:, :, 1:])
        out_RC = (seen_RCW.to(self._weight_CW.dtype) * self._weight_CW).sum(-1)
        if self._bias_C is not None:
            out_RC = out_RC + self._bias_C
        return self._activate(out_RC).to(inputs_R[0].dtype)
