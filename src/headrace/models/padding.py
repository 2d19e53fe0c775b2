"""The tokens of a pass in the padded rows of its attention, and back.

    tokens [N, ...] ── spread: slot s holds token token_S[s] ──▶ slots [S, ...] ── attention ──▶ slots
    tokens [N, ...] ◀── collect: token n is in slot slot_N[n] ─────────────────────────────────────┘

Each of the two is the backward pass of the other, so that both passes are copies of rows. Torch's own backward of such
a copy adds row by row into zeros, once for every group of rows. If several sequences share a token, it has a slot in
each; the gradient of the token is then the sum of theirs.

Shape legend: N tokens, S slots, padding included, R slots without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

CopyRows = Callable[[Tensor], Tensor]
"""Returns rows of a tensor in another order, some of them several times, not at all, or summed."""


class PaddedSlots:
    """The slots of every token of a pass, and the copies between tokens and slots. Padding repeats a token of its row;
    where attention is causal, nothing depends on it, so its gradient is 0."""

    def __init__(
        self, token_S: npt.NDArray[np.int64], is_padding_S: npt.NDArray[np.bool_], device: torch.device | str
    ) -> None:
        """``token_S`` is the token in each slot; every token has one. ``is_padding_S`` says which slots are padding.
        The copies are made on ``device``, and what they need is worked out here, so that nothing waits for it."""
        slots_R = np.flatnonzero(~is_padding_S)
        slots_R = slots_R[np.argsort(token_S[slots_R], kind="stable")]
        counts_N = np.bincount(token_S[slots_R])
        self._token_S = torch.from_numpy(token_S).to(device)
        self._padding = torch.from_numpy(np.flatnonzero(is_padding_S)).to(device)
        self._slots_R = torch.from_numpy(slots_R).to(device)
        """The slots of token 0, then those of token 1, and so on."""
        self._first_N = torch.from_numpy(np.cumsum(counts_N) - counts_N).to(device)
        """The index in ``_slots_R`` of each token's first slot."""
        self._shared = len(slots_R) > len(counts_N)

    def spread(self, tensor: Tensor) -> Tensor:
        """Return the slots ``[S, ...]``, padding included, that hold the tokens ``[N, ...]``; with gradients."""
        if not tensor.requires_grad:
            return self._into_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._into_slots, self._out_of_slots)  # type: ignore[no-untyped-call]
        return found

    def collect(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` out of the slots ``[S, ...]``, where each token has one; with gradients."""
        assert not self._shared
        if not tensor.requires_grad:
            return self._out_of_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._out_of_slots, self._into_slots_read)  # type: ignore[no-untyped-call]
        return found

    def _into_slots(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into their slots ``[S, ...]``, and into the padding."""
        return tensor.index_select(0, self._token_S)

    def _into_slots_read(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into the slots that :meth:`collect` reads, with zeros in the padding:
        the gradient of what :meth:`collect` does."""
        return self._into_slots(tensor).index_fill_(0, self._padding, 0)

    def _out_of_slots(self, tensor: Tensor) -> Tensor:
        """Return, for each token ``[N, ...]``, the sum of its slots ``[S, ...]``."""
        if not self._shared:
            return tensor.index_select(0, self._slots_R)
        summed: Tensor = F.embedding_bag(self._slots_R, tensor.flatten(1), self._first_N, mode="sum")
        return summed.view(-1, *tensor.shape[1:])


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
