"""The mean over prompts of each one's token mean."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import BatchLayout, Shares
from headrace.algo.reductions.counting import tokens_by
from headrace.config import Section


class PromptMean(Section):
    """1/P Σ_prompts (Σ_tokens of its rollouts x / their number).

    Source: Khatri et al. (ScaleRL), arXiv 2510.13786, section 3.2.
    """

    kind: Literal["prompt_mean"] = "prompt_mean"
    """Selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        tokens_N, num_groups = tokens_by(layout.groups_S, layout)
        return Shares(weights_N=layout.mask_N.float() / tokens_N, mass=num_groups)
