"""A filter for groups in which every attempt earned the same reward, so that there is nothing to compare."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict, comparable_rewards


class ZeroVariance(FilterSection):
    """A filter that drops a group whose rewards are all equal. Where agents earned rewards of their own, it drops the
    group if the rewards are equal within every role. The reason that it counts is ``zero_variance``.

    Advantages within such a group are 0, so its tokens would only dilute the mean over the batch.
    """

    advice: ClassVar[str] = (
        "make tasks easier where rewards are low and harder where they are high, raise flow.group_size or "
        "engine.temperature"
    )

    kind: Literal["zero_variance"] = "zero_variance"
    """Selects this filter."""
    tolerance: float = Field(default=0.0, ge=0)
    """Rewards whose difference is at most this value count as equal."""

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        if num_episodes > 1:
            return None
        return "a group of one has nothing to compare, and would be dropped", "leave it out, or raise flow.group_size"

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        if any(max(rewards) - min(rewards) > self.tolerance for rewards in comparable_rewards(group.counted)):
            return KEEP
        return Verdict(reason="zero_variance", drop=True)
