"""The tokens of a pass in the padded rows of its attention, and back.

    tokens [N, ...] ── spread: slot s holds token token_S[s] ──▶ slots [S, ...] ── attention ──▶ slots
    tokens [N, ...] ◀── collect: token n is in slot slot_N[n] ─────────────────────────────────────┘

Each of the two is the backward pass of the other, so that both passes are copies of rows. Torch's own backward of such
a copy adds row by row into zeros, once for every group of rows.

Shape legend: N tokens, S slots, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CopyRows = Callable[[Tensor], Tensor]
"""Returns rows of a tensor in another order, some of them several times or not at all."""


class PaddedSlots:
    """The slot of every token of a pass, and the copies between tokens and slots. Padding repeats a token of its row;
    where attention is causal, nothing depends on it, so its gradient is 0."""

    def __init__(self, token_S: Tensor, slot_N: Tensor, *, shared: bool) -> None:
        """``token_S`` is the token in each slot, and ``slot_N`` one slot of each token. If sequences share tokens
        (``shared``), a token has several slots, and torch sums their gradients."""
        self._token_S, self._slot_N, self._shared = token_S, slot_N, shared
        is_unread = torch.ones(len(token_S), dtype=torch.bool, device=token_S.device)
        is_unread[slot_N] = False
        self._unread = is_unread.nonzero().flatten()

    def spread(self, tensor: Tensor) -> Tensor:
        """Return the slots ``[S, ...]``, padding included, that hold the tokens ``[N, ...]``; with gradients."""
        if self._shared or not tensor.requires_grad:
            return self._into_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._into_slots, self._out_of_slots)  # type: ignore[no-untyped-call]
        return found

    def collect(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` out of the slots ``[S, ...]``; with gradients."""
        if not tensor.requires_grad:
            return self._out_of_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._out_of_slots, self._into_slots_read)  # type: ignore[no-untyped-call]
        return found

    def _into_slots(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into their slots ``[S, ...]``, and into the padding."""
        return tensor.index_select(0, self._token_S)

    def _into_slots_read(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into the slots that :meth:`collect` reads, with zeros in the others:
        the gradient of what :meth:`collect` does."""
        return self._into_slots(tensor).index_fill_(0, self._unread, 0)

    def _out_of_slots(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied out of their slots ``[S, ...]``; a token with several slots is read
        from one."""
        return tensor.index_select(0, self._slot_N)


class _Copy(torch.autograd.Function):
    """A copy of rows whose backward pass is another copy of rows, given as two functions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: CopyRows, back: CopyRows) -> Tensor:
        """Return the rows of ``tensor`` as ``there`` copies them; ``back`` copies the gradient in the backward pass."""
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the copied tensor."""
        return ctx.back(grad), None, None
