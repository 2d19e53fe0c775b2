"""The contract of a filter: a pure function of one scored group that keeps the group, keeps some of its episodes, or
drops it.

Filters are applied in order; each receives the group as the filter before it returned it. A dropped group frees its
slot at once and another group is admitted in its place, so filters never make a batch smaller. An episode that a filter
removes from a group that is kept gets one of two statuses:

    left out   as if it had never been sampled: advantages are computed over the other episodes
    masked     its reward counts in the baseline of its group, and its tokens carry no loss

The ledger counts every reason, in groups, in episodes and in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headrace.base.config import Section
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, get_role
from headrace.base.types.scored import ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterContext:
    """The information that a filter can use in addition to the group."""

    decode: Callable[[Sequence[int]], str]
    """The function that decodes token ids to text."""
    seed: int
    """Seed of the run. Random choices are a function of this seed and of the number of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of a filter about a group; :data:`KEEP` means that it changes nothing."""

    reason: str = ""
    """The reason of the decision: one word, which is counted. Empty where nothing is removed."""
    drop: bool = False
    """Whether the whole group is dropped."""
    leave_out: frozenset[int] = frozenset()
    """Positions in the group (from 0) of the scored episodes that are left out."""
    mask: frozenset[int] = frozenset()
    """Positions in the group (from 0) of the scored episodes that are masked: their rewards count in the baseline, and
    their tokens carry no loss."""
    keep_masked: bool = False
    """Whether the group is kept even if all of its episodes are masked, so that none of its tokens carries loss."""


KEEP = Verdict()
"""The decision to keep a group unchanged."""


class FilterSection(Section):
    """The base class of all filters, which is also the section of their settings."""

    advice: ClassVar[str]
    """Advice for a user whose groups are all dropped by this filter."""

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """Return the decision about ``group``, which has at least one episode that is scored or was masked by an
        earlier filter. Each filter implements this."""
        raise NotImplementedError

    @property
    def first(self) -> int | None:
        """Return how many finished episodes complete a group, after which its other episodes are cancelled; ``None``:
        the filter needs all episodes."""
        return None

    def episodes_left(self, num_episodes: int) -> int:
        """Return the largest number of episodes that can remain of a group of ``num_episodes`` after this filter. Only
        the check of the settings calls it."""
        return num_episodes

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return why the filter cannot work with groups of ``min_episodes`` to ``num_episodes`` episodes, and the
        remedy, both as texts for an error message; ``None`` if it can. Only the check of the settings calls it."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The result of applying all filters to one group: the resulting group, or the reason why it is dropped."""

    group: ScoredGroup
    """The group with the new statuses of its episodes; the original group if it is dropped."""
    dropped: str = ""
    """The reason why the group is dropped; empty if it is kept."""
    by: FilterSection | None = None
    """The filter that dropped the group; ``None`` if it is kept."""


def apply_filters(
    group: ScoredGroup, filters: Sequence[FilterSection], *, min_episodes: int, context: FilterContext
) -> Filtered:
    """Return the result of applying ``filters`` to ``group`` in order. ``context`` is passed to each filter.

    A group is dropped, with the reason of the filter's decision, in three cases: the filter drops it, fewer than
    ``min_episodes`` of its episodes still count in the baseline, or no episode is left to train. In the last case, a
    decision with ``keep_masked`` keeps the group.
    """
    filtered = group
    for each in filters:
        verdict = each(filtered, context)
        if verdict.drop:
            return Filtered(group=group, dropped=verdict.reason, by=each)
        if not verdict.leave_out and not verdict.mask:
            continue
        filtered = _apply_verdict(filtered, verdict)
        if len(filtered.counted) < min_episodes or not (filtered.scored or verdict.keep_masked):
            return Filtered(group=group, dropped=verdict.reason, by=each)
    return Filtered(group=filtered)


def _apply_verdict(group: ScoredGroup, verdict: Verdict) -> ScoredGroup:
    """Return a copy of the group in which the episodes that the verdict leaves out or masks have the status LEFT_OUT or
    MASKED, with the verdict's reason as their cause."""
    statuses = dict.fromkeys(verdict.leave_out, EpisodeStatus.LEFT_OUT) | dict.fromkeys(
        verdict.mask, EpisodeStatus.MASKED
    )
    return replace(
        group,
        episodes=tuple(
            replace(episode, status=statuses[episode.key.place], cause=verdict.reason)
            if episode.key.place in statuses
            else episode
            for episode in group.episodes
        ),
    )


def undo_filters(episodes: Sequence[EpisodeGraph]) -> tuple[EpisodeGraph, ...]:
    """Return the episodes with the statuses that they had before any filter: an episode that was left out or masked and
    has a reward becomes scored again. The controller uses this to filter a group again as a whole after a crash."""
    set_by_filters = (EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)
    return tuple(
        replace(episode, status=EpisodeStatus.SCORED, cause="")
        if episode.status in set_by_filters and episode.reward is not None
        else episode
        for episode in episodes
    )


def get_rewards(episodes: Sequence[EpisodeGraph]) -> list[float]:
    """Return the rewards of the episodes that have a reward, in order."""
    return [episode.reward for episode in episodes if episode.reward is not None]


def comparable_rewards(episodes: Sequence[EpisodeGraph]) -> list[list[float]]:
    """Return the lists of rewards that are compared with each other within a group: one list with the rewards of its
    episodes or, where agents earned rewards of their own, one list for each role that is trained."""
    if not any(episode.agent_rewards for episode in episodes):
        return [get_rewards(episodes)]
    by_role: dict[str, list[float]] = {}
    for episode in episodes:
        for agent, reward in episode.shares.items():
            by_role.setdefault(get_role(agent), []).append(reward)
    return list(by_role.values())


def as_tables(value: Any) -> Any:
    """Return the value of ``flow.filters`` as a tuple of tables. A name stands for the table of that kind, a single
    filter for a list with one element, and ``"none"`` for no filters.

    >>> as_tables("zero_variance"), as_tables(["length", {"kind": "redundancy", "keep": 6}])
    (({'kind': 'zero_variance'},), ({'kind': 'length'}, {'kind': 'redundancy', 'keep': 6}))
    """
    if isinstance(value, str) and value == "none":
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple({"kind": part} if isinstance(part, str) else part for part in listed)
