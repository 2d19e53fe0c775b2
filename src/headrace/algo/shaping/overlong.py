"""DAPO's soft punishment of answers that come near the limit."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import given
from headrace.algo.advantages.scores import Floats, Scores
from headrace.config import Section


class Overlong(Section):
    """R + p·clip((L − c − |y|)/c, −1, 0): nothing up to L − c tokens, falling to −p at L. Needs lengths.

    Source: Yu et al. (DAPO), arXiv 2503.14476, eq. 13.
    """

    kind: Literal["overlong"] = "overlong"
    """Selects this shaping."""
    max_tokens: int = Field(ge=1)
    """L: the longest answer allowed, in tokens."""
    buffer: int = Field(ge=1)
    """c: over how many tokens before L the punishment grows."""
    penalty: float = Field(default=1.0, ge=0)
    """p: what an answer of L tokens loses."""

    def __call__(self, scores: Scores) -> Floats:
        """The shaped reward of every episode."""
        over_E = (self.max_tokens - self.buffer - given(scores.lengths_E, "lengths")) / self.buffer
        return scores.rewards_E + self.penalty * np.clip(over_E, -1.0, 0.0)
