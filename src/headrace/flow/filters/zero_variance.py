"""Groups in which every attempt earned the same: there is nothing to prefer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict, compared


class ZeroVariance(FilterSection):
    """Drops a group whose rewards are all equal (``zero_variance``); where agents earned each their own, those of every
    role.

    Advantages taken within groups are 0 there, so its tokens would only thin out the mean over the batch.
    """

    advice: ClassVar[str] = (
        "make tasks easier where rewards are low and harder where they are high, raise flow.group_size or "
        "engine.temperature"
    )

    kind: Literal["zero_variance"] = "zero_variance"
    """Selects this filter."""
    tolerance: float = Field(default=0.0, ge=0)
    """Rewards that lie no further apart than this count as equal."""

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        if num_episodes > 1:
            return None
        return "a group of one has nothing to compare, and would be dropped", "leave it out, or raise flow.group_size"

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        if any(max(rewards) - min(rewards) > self.tolerance for rewards in compared(group.counted)):
            return KEEP
        return Verdict(reason="zero_variance", drop=True)
