"""Group redundancy: more attempts than are trained, so that no group waits for its stragglers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters.base import KEEP, FilterContext, FilterSection, Verdict

REDUNDANT = "redundant"
"""Why an episode is left out that was not among the first of its group."""


class Redundancy(FilterSection):
    """Of the ``flow.group_size`` episodes of a group the first ``keep`` that finish are trained; the others are
    withdrawn from the engine at once (``redundant``).

    Long answers finish late: what is trained is shorter than what was asked for. Advantages are taken over the kept
    ones.
    """

    advice: ClassVar[str] = "raise keep, or lower flow.min_episodes"

    kind: Literal["redundancy"] = "redundancy"
    """Selects this filter."""
    keep: int = Field(ge=1)
    """Episodes of a group that are trained."""

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
        """The others have been withdrawn while the group ran."""
        return KEEP
