"""DAPO's soft punishment of answers that come near the limit."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pydantic
from pydantic import Field

from headrace.algo.advantages.base import given
from headrace.algo.advantages.outcomes import Floats, Outcomes
from headrace.config import Section
from headrace.errors import ConfigError


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

    @pydantic.model_validator(mode="after")
    def _begins_above_zero(self) -> Overlong:
        if self.buffer > self.max_tokens:
            raise ConfigError(
                f"shaping 'overlong' has buffer={self.buffer} above max_tokens={self.max_tokens}: an empty answer is "
                "punished",
                remedy="set buffer <= max_tokens",
            )
        return self

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The shaped reward of every episode."""
        over_E = (self.max_tokens - self.buffer - given(outcomes.lengths_E, "lengths")) / self.buffer
        return outcomes.rewards_E + self.penalty * np.clip(over_E, -1.0, 0.0)
