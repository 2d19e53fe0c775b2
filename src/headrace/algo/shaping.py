"""Shaping: terms that are added to rewards before advantages are computed. A new shaping is a class and a row of
``AnyShaping``. R is the reward of an episode and |y| the length of its answer in tokens; E episodes."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import Field

from headrace.algo.advantages.base import require
from headrace.algo.advantages.outcomes import Floats, Outcomes
from headrace.base.config import Section
from headrace.base.config.kinds import Kinds
from headrace.base.errors import ConfigError


class Overlong(Section):
    """DAPO's soft penalty for answers that are almost as long as allowed.

    R + p·clip((L − c − |y|)/c, −1, 0): no penalty up to L − c tokens, a linear decrease to −p at L. Needs lengths.

    Source: Yu et al. (DAPO), arXiv 2503.14476, eq. 13.
    """

    kind: Literal["overlong"] = "overlong"
    """The name that selects this shaping."""
    max_tokens: int = Field(ge=1)
    """L, the largest number of tokens of an answer."""
    buffer: int = Field(ge=1)
    """c, the number of tokens before L over which the penalty increases."""
    penalty: float = Field(default=1.0, ge=0)
    """p, the penalty of an answer of L tokens."""

    @pydantic.model_validator(mode="after")
    def _begins_above_zero(self) -> Overlong:
        """Refuse a buffer that is larger than the largest length."""
        if self.buffer > self.max_tokens:
            raise ConfigError(
                f"shaping 'overlong' has buffer={self.buffer} above max_tokens={self.max_tokens}: an empty answer is "
                "punished",
                remedy="set buffer <= max_tokens",
            )
        return self

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the shaped reward of every episode: the reward plus the penalty of its length. A reward of NaN, which
        does not count, stays NaN."""
        over_E = (self.max_tokens - self.buffer - require(outcomes.lengths_E, "lengths")) / self.buffer
        return outcomes.rewards_E + self.penalty * np.clip(over_E, -1.0, 0.0)


class LengthShaping(Section):
    """The length reward of Kimi k1.5: among the answers to one prompt, shorter answers have larger rewards.

    R + w·λ if R > threshold, else R + w·min(0, λ); λ = ½ − (|y| − shortest)/(longest − shortest) of the group.

    A group whose answers all have the same length is not changed. Needs lengths. Source: Kimi k1.5, arXiv 2501.12599,
    section 2.3.3.
    """

    kind: Literal["length"] = "length"
    """The name that selects this shaping."""
    weight: float = Field(default=1.0, ge=0)
    """w, the weight of the length reward."""
    threshold: float = 0.5
    """The reward above which an answer counts as correct. Only correct answers gain by being short."""

    def __call__(self, outcomes: Outcomes) -> Floats:
        """Return the shaped reward of every episode: the reward plus the length reward among the counted answers of its
        group. A reward of NaN, which does not count, stays NaN."""
        lengths_E = require(outcomes.lengths_E, "lengths").astype(np.float64)
        _, index = np.unique(outcomes.groups_E, return_inverse=True)
        shortest, longest = np.full(len(lengths_E), np.inf), np.full(len(lengths_E), -np.inf)
        counted_E = outcomes.counted_E
        np.minimum.at(shortest, index[counted_E], lengths_E[counted_E])
        np.maximum.at(longest, index[counted_E], lengths_E[counted_E])
        range_E = np.where(counted_E, longest[index] - shortest[index], 0.0)
        share_E = np.divide(lengths_E - shortest[index], range_E, out=np.full(len(lengths_E), 0.5), where=range_E > 0)
        bonus_E = 0.5 - share_E
        right_E = outcomes.values_E > self.threshold
        shaped_E: Floats = outcomes.rewards_E + self.weight * np.where(right_E, bonus_E, np.minimum(bonus_E, 0.0))
        return shaped_E


AnyShaping = Overlong | LengthShaping
SHAPINGS = Kinds(AnyShaping, group="headrace.shapings", setting="algo.shaping", contract=Section)
"""The registry of shapings, including those of installed packages."""
ShapingConfig = Annotated[AnyShaping, SHAPINGS]
