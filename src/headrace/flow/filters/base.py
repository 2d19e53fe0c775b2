"""The contract of a filter: a pure function of one scored group that keeps the group, keeps some of its episodes, or
drops it.

Filters are applied in order; each gets what the filter before it left. A dropped group frees its slot at once and
another group is admitted in its place, so a batch has exactly its size whatever the filters do. An episode that a
filter removes from a group that stays is one of two things:

    left out   as if it had never been sampled: advantages are computed over the other episodes
    masked     its reward counts in the baseline of its group, and its tokens carry no loss

The ledger counts every reason, in groups, in episodes and in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from headrace.base.config import Section
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, role_of
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
    """Whether the group stays even if all of its episodes are masked, so that it trains nothing."""


KEEP = Verdict()


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
        """Return how many finished episodes complete a group, so that the others are cancelled; ``None``: the filter
        needs all of them."""
        return None

    def episodes_left(self, num_episodes: int) -> int:
        """Return the greatest number of episodes that the filter can leave of a group of ``num_episodes``, for the
        check of the settings."""
        return num_episodes

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Return why the filter cannot work with groups of ``min_episodes`` to ``num_episodes`` episodes, and the
        remedy, both for an error message; ``None`` if it can. The check of the settings calls this."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The result of applying all filters to one group: the group that is left, or the reason why it is dropped."""

    group: ScoredGroup
    """The group, whose episodes have their new statuses; unchanged if the group is dropped."""
    dropped: str = ""
    """The reason why the group is dropped; empty if it stays."""
    by: FilterSection | None = None
    """The filter that dropped the group; ``None`` if it stays."""


def apply_filters(
    group: ScoredGroup, filters: Sequence[FilterSection], *, min_episodes: int, context: FilterContext
) -> Filtered:
    """Apply the filters to ``group`` in order and return the result. ``context`` is passed to each of them.

    A group is dropped, with the reason of the filter at which this happens, if the filter drops it, if fewer than
    ``min_episodes`` of its episodes still count in the baseline, or if none of them is left to train. A decision with
    ``keep_masked`` keeps a group in the last case.
    """
    left = group
    for each in filters:
        verdict = each(left, context)
        if verdict.drop:
            return Filtered(group=group, dropped=verdict.reason, by=each)
        if not verdict.leave_out and not verdict.mask:
            continue
        left = _apply_verdict(left, verdict)
        if len(left.counted) < min_episodes or not (left.scored or verdict.keep_masked):
            return Filtered(group=group, dropped=verdict.reason, by=each)
    return Filtered(group=left)


def _apply_verdict(group: ScoredGroup, verdict: Verdict) -> ScoredGroup:
    """Return a copy of the group in which the episodes that the verdict leaves out or masks have that status, with the
    reason as its cause."""
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


def unfiltered(episodes: Sequence[EpisodeGraph]) -> tuple[EpisodeGraph, ...]:
    """Return the episodes with the statuses they had before any filter: one that was left out or masked, and has a
    reward, becomes scored again. A group that a crash interrupted is filtered again as a whole."""
    undone = (EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)
    return tuple(
        replace(episode, status=EpisodeStatus.SCORED, cause="")
        if episode.status in undone and episode.reward is not None
        else episode
        for episode in episodes
    )


def rewards_of(episodes: Sequence[EpisodeGraph]) -> list[float]:
    """Return the rewards of the episodes, in order, without the episodes that have none."""
    return [episode.reward for episode in episodes if episode.reward is not None]


def comparable_rewards(episodes: Sequence[EpisodeGraph]) -> list[list[float]]:
    """Return the lists of rewards that are compared with each other within a group: one list with the rewards of its
    episodes or, where agents earned rewards of their own, one list for each role that is trained."""
    if not any(episode.agent_rewards for episode in episodes):
        return [rewards_of(episodes)]
    by_role: dict[str, list[float]] = {}
    for episode in episodes:
        for agent, reward in episode.shares.items():
            by_role.setdefault(role_of(agent), []).append(reward)
    return list(by_role.values())


def as_tables(value: Any) -> Any:
    """Return the value of ``flow.filters`` as a tuple of tables. A name alone stands for the table of that kind, one
    filter for a list of one, and ``"none"`` for no filters.

    >>> as_tables("zero_variance"), as_tables(["length", {"kind": "redundancy", "keep": 6}])
    (({'kind': 'zero_variance'},), ({'kind': 'length'}, {'kind': 'redundancy', 'keep': 6}))
    """
    if isinstance(value, str) and value == "none":
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple({"kind": part} if isinstance(part, str) else part for part in listed)
