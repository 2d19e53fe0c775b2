"""The mean over the tokens of the batch."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import BatchLayout, Shares
from headrace.config import Section


class TokenMean(Section):
    """Σ_tokens x / number of tokens. Source: Yu et al., arXiv 2503.14476, eq. 8."""

    kind: Literal["token_mean"] = "token_mean"
    """Selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        mask_N = layout.mask_N.float()
        return Shares(weights_N=mask_N, mass=mask_N.sum())
