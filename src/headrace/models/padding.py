"""The tokens of a pass in the padded rows of its attention, and back.

    tokens [N, ...] ── spread: slot s holds token token_S[s] ──▶ slots [S, ...] ── attention ──▶ slots
    tokens [N, ...] ◀── collect: token n is in slot slot_N[n] ─────────────────────────────────────┘

Each of the two is the backward pass of the other, so that both passes are copies of rows. Torch's own backward of such
a copy adds row by row into zeros, once for every group of rows.

Shape legend: N tokens, S slots, padding included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PaddedSlots:
    """The slot of every token. Padding repeats a token of its row; where attention is causal, nothing depends on it, so
    its gradient is 0."""

    def __init__(self, token_S: Tensor, slot_N: Tensor, *, shared: bool) -> None:
        """``token_S`` is the token in each slot, and ``slot_N`` one slot of each token. If sequences share tokens
        (``shared``), a token has several slots, and torch sums their gradients."""
        self._token_S, self._slot_N, self._shared = token_S, slot_N, shared
        is_empty = torch.ones(len(token_S), dtype=torch.bool, device=token_S.device)
        is_empty[slot_N] = False
        self.empty = is_empty.nonzero().flatten()
        """The slots that :meth:`collect` does not read."""

    def spread(self, tensor: Tensor) -> Tensor:
        """Return the slots ``[S, ...]`` of the tokens ``[N, ...]``."""
        if self._shared or not tensor.requires_grad:
            return self.at_slots(tensor)
        found: Tensor = _Spread.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def collect(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` of the slots ``[S, ...]``."""
        if not tensor.requires_grad:
            return self.at_tokens(tensor)
        found: Tensor = _Collect.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def at_slots(self, tensor: Tensor) -> Tensor:
        """Copy the tokens to their slots."""
        return tensor.index_select(0, self._token_S)

    def at_tokens(self, tensor: Tensor) -> Tensor:
        """Copy the slots to their tokens."""
        return tensor.index_select(0, self._slot_N)


class _Spread(torch.autograd.Function):
    """Tokens to slots; gradients go back from each token's slot."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slots: PaddedSlots) -> Tensor:
        ctx.slots = slots
        return slots.at_slots(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.at_tokens(grad), None


class _Collect(torch.autograd.Function):
    """PaddedSlots to tokens; gradients go back to each token's slot."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, slots: PaddedSlots) -> Tensor:
        ctx.slots = slots
        return slots.at_tokens(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.at_slots(grad).index_fill_(0, ctx.slots.empty, 0), None
