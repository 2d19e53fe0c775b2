"""Copies of the tokens of a pass into the padded rows of its attention, and back.

    tokens [N, ...] ── spread: slot s contains token token_S[s] ──▶ slots [S, ...] ── attention ──▶ slots
    tokens [N, ...] ◀── collect: token n is in slot slot_N[n] ─────────────────────────────────────┘

Each of the two copies is the backward pass of the other, so that both passes are copies of rows. Torch's own backward
pass of such a copy would add row by row to zeros, once for every group of rows. If several sequences share a token, the
token has a slot in each of them; its gradient is then the sum of the gradients of its slots.

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
"""A function that copies rows of a tensor into another order. Rows may be repeated, left out, or summed."""


def gather_rows(
    begins_B: npt.NDArray[np.int64], counts_B: npt.NDArray[np.int64], place_N: npt.NDArray[np.int64], filled: int
) -> npt.NDArray[np.int64]:
    """Return the index of each token of several rows, ``[B, L]``, padded with the first token of the row. Row b has
    ``counts_B[b]`` tokens from the index ``begins_B[b]`` on. Also write into ``place_N`` the index of each of these
    tokens in the result, counted from ``filled``."""
    column_L = np.arange(int(counts_B.max()))
    inside_BL = column_L < counts_B[:, None]
    gather_BL: npt.NDArray[np.int64] = begins_B[:, None] + np.where(inside_BL, column_L, 0)
    place_N[gather_BL[inside_BL]] = filled + np.flatnonzero(inside_BL)
    return gather_BL


class PaddedSlots:
    """The slots of every token of a pass, and the copies between tokens and slots. Padding repeats a token of its row.
    Under causal attention no result depends on padding, so its gradient is 0."""

    def __init__(
        self, token_S: npt.NDArray[np.int64], is_padding_S: npt.NDArray[np.bool_], device: torch.device | str
    ) -> None:
        """Compute the index tensors of both copies on the host and move them to ``device``, so that a copy does not
        wait for the device. ``token_S`` is the token in each slot; every token has a slot. ``is_padding_S`` says which
        slots are padding."""
        slots_R = np.flatnonzero(~is_padding_S)
        slots_R = slots_R[np.argsort(token_S[slots_R], kind="stable")]
        counts_N = np.bincount(token_S[slots_R])
        self._token_S = torch.from_numpy(token_S).to(device)
        """The token in each slot."""
        self._padding = torch.from_numpy(np.flatnonzero(is_padding_S)).to(device)
        """The slots that are padding."""
        self._slots_R = torch.from_numpy(slots_R).to(device)
        """The slots without padding, ordered by their token."""
        self._first_N = torch.from_numpy(np.cumsum(counts_N) - counts_N).to(device)
        """The index in ``_slots_R`` of each token's first slot."""
        self._shared = len(slots_R) > len(counts_N)
        """Whether a token has several slots without padding."""

    def spread(self, tensor: Tensor) -> Tensor:
        """Return the slots ``[S, ...]``, padding included, for ``tensor``, the tokens ``[N, ...]``; with gradients."""
        if not tensor.requires_grad:
            return self._into_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._into_slots, self._out_of_slots)  # type: ignore[no-untyped-call]
        return found

    def collect(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` from ``tensor``, the slots ``[S, ...]``, of which each token has one; with
        gradients."""
        assert not self._shared
        if not tensor.requires_grad:
            return self._out_of_slots(tensor)
        found: Tensor = _Copy.apply(tensor, self._out_of_slots, self._into_read_slots)  # type: ignore[no-untyped-call]
        return found

    def _into_slots(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into their slots ``[S, ...]`` and into the padding."""
        return tensor.index_select(0, self._token_S)

    def _into_read_slots(self, tensor: Tensor) -> Tensor:
        """Return the tokens ``[N, ...]`` copied into the slots that :meth:`collect` reads, with zeros in the padding.
        This is the backward pass of :meth:`collect`."""
        return self._into_slots(tensor).index_fill_(0, self._padding, 0)

    def _out_of_slots(self, tensor: Tensor) -> Tensor:
        """Return, for each token ``[N, ...]``, the sum of its slots ``[S, ...]``."""
        if not self._shared:
            return tensor.index_select(0, self._slots_R)
        summed: Tensor = F.embedding_bag(self._slots_R, tensor.flatten(1), self._first_N, mode="sum")
        return summed.view(-1, *tensor.shape[1:])


class _Copy(torch.autograd.Function):
    """A copy of rows whose backward pass is another copy of rows; both are functions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy_forward: CopyRows, copy_backward: CopyRows) -> Tensor:
        """Return ``there(tensor)``. ``back`` is the function that copies the gradient in the backward pass."""
        ctx.copy_backward = copy_backward
        return copy_forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``tensor``, which is ``back`` of the gradient ``grad``."""
        return ctx.copy_backward(grad), None, None
