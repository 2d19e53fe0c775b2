"""The dynamic sampling of DAPO: train only on tasks that the policy solves sometimes."""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict, rewards_of


class DynamicSampling(FilterSection):
    """A filter that drops a group unless the share of its correct episodes lies strictly between two bounds. The
    reasons that it counts are ``accuracy_too_low`` and ``accuracy_too_high``.

    Source: Yu et al. (DAPO), arXiv 2503.14476, eq. 11: 0 < the number of right answers < G, sampling until the batch is
    full.
    """

    advice: ClassVar[str] = (
        "make tasks easier where accuracy is too low and harder where it is too high, raise flow.group_size, widen the "
        "filter's low and high, or look whether its threshold tells right from wrong"
    )

    kind: Literal["dynamic_sampling"] = "dynamic_sampling"
    """Selects this filter."""
    low: float = Field(default=0.0, ge=0, le=1)
    """A share of correct answers up to this value is too low."""
    high: float = Field(default=1.0, ge=0, le=1)
    """A share of correct answers from this value on is too high."""
    threshold: float = 0.5
    """An answer with a reward above this value counts as correct."""

    @pydantic.model_validator(mode="after")
    def _leaves_room(self) -> DynamicSampling:
        if self.low >= self.high:
            raise ConfigError(
                f"filter 'dynamic_sampling' has low={self.low:g} and high={self.high:g}: it drops every group",
                remedy="set low < high",
            )
        return self

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        sizes = range(min_episodes, num_episodes + 1)
        if any(self.low < right / size < self.high for size in sizes for right in range(size + 1)):
            return None
        shares = ", ".join(f"{right / num_episodes:.3g}" for right in range(num_episodes + 1))
        return (
            f"low={self.low:g} and high={self.high:g} leave no room: of {num_episodes} episodes a share of {shares} "
            "can be right",
            "widen low and high, or raise flow.group_size",
        )

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        rewards = rewards_of(group.counted)
        accuracy = sum(reward > self.threshold for reward in rewards) / len(rewards)
        if accuracy <= self.low:
            return Verdict(reason="accuracy_too_low", drop=True)
        return Verdict(reason="accuracy_too_high", drop=True) if accuracy >= self.high else KEEP
