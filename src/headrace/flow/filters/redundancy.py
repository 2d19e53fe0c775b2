"""Group redundancy: sample more attempts than are trained, so that no group waits for its stragglers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict

REDUNDANT = "redundant"
"""The reason that is counted for an episode that was not among the first of its group."""


class Redundancy(FilterSection):
    """A filter that trains the first ``keep`` of the ``flow.group_size`` episodes of a group and cancels the others in
    the engine at once. The reason that it counts is ``redundant``.

    Long answers finish late, so the trained answers are shorter than the sampled ones. Advantages are computed over the
    kept episodes.
    """

    advice: ClassVar[str] = "raise keep, or lower flow.min_episodes"

    kind: Literal["redundancy"] = "redundancy"
    """Selects this filter."""
    keep: int = Field(ge=1)
    """Number of episodes of a group that are trained."""

    @property
    def first(self) -> int | None:
        return self.keep

    def episodes_left(self, num_episodes: int) -> int:
        return self.keep

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        if self.keep >= num_episodes:
            return (
                f"keep={self.keep}, and a group has {num_episodes} episodes: none would be redundant",
                f"set keep <= {num_episodes - 1}, or raise flow.group_size",
            )
        return None

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return :data:`KEEP`, because the other episodes were already cancelled while the group ran."""
        return KEEP
