"""The mean over the tokens of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headrace.algo.base import BatchLayout
from headrace.config import Section

if TYPE_CHECKING:
    from torch import Tensor


class TokenMean(Section):
    """Σ_tokens x / number of tokens. Source: Yu et al., arXiv 2503.14476, eq. 8."""

    kind: Literal["token_mean"] = "token_mean"
    """Selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Tensor:
        """The weight of every token."""
        mask_N = layout.mask_N.float()
        return mask_N / mask_N.sum().clamp(min=1.0)
