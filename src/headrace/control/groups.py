"""Groups whose episodes are being run or scored, the decision whether a group is trained, and the count of groups that
filters drop in a row.

A group holds the attempts (episodes) at one task; the *place* of an episode is its index in the group, from 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.errors import NothingToLearn
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.flow.filters import (
    REDUNDANT,
    FilterContext,
    FilterSection,
    apply_filters,
    comparable_rewards,
    get_rewards,
    undo_filters,
)
from headrace.rollout import Withdrawal


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that is being generated and scored. The rollout loop creates it and runs its episodes; the scoring loop
    collects the episodes and closes the group."""

    number: int
    """The number of the group in the run."""
    task: Task
    """The task that all of its episodes attempt."""
    size: int
    """Number of episodes that the group will have."""
    first: int | None = None
    """Number of finished episodes that complete the group, after which its other episodes are cancelled; ``None``: all
    episodes are needed."""
    episodes: dict[int, EpisodeGraph] = field(default_factory=dict)
    """The collected episodes, by place: the episodes that have ended and, if the group is scored as a whole, also
    finished episodes that wait for their score."""
    running: dict[int, Withdrawal] = field(default_factory=dict)
    """The handle that cancels an episode, for each running episode, by place."""
    num_finished: int = 0
    """Number of finished episodes that belong to the group. Failed, cancelled and excluded episodes are not counted."""

    @property
    def complete(self) -> bool:
        """Return whether all episodes of the group are collected."""
        return len(self.episodes) == self.size

    @property
    def has_enough(self) -> bool:
        """Return whether ``first`` episodes have finished, so that the other episodes are not needed; false if
        ``first`` is ``None``."""
        return self.first is not None and self.num_finished >= self.first

    @property
    def in_order(self) -> tuple[EpisodeGraph, ...]:
        """Return the collected episodes of the group, in the order of their places."""
        return tuple(self.episodes[place] for place in sorted(self.episodes))

    def record_finished(self, episode: EpisodeGraph) -> None:
        """Count ``episode``, which has finished. If enough episodes had finished before it, mark it as redundant. If it
        is the last episode that was needed, cancel the running episodes."""
        if self.has_enough:
            episode.status, episode.cause = EpisodeStatus.LEFT_OUT, REDUNDANT
            return
        self.num_finished += 1
        if self.has_enough:  # this episode was the last that was needed
            for withdrawal in self.running.values():
                withdrawal.withdraw(REDUNDANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedGroup:
    """The decision about a group whose episodes have all ended: it is trained or dropped."""

    group: ScoredGroup
    """The group after the filters; if the group is dropped, the group before the filters."""
    reason: str = ""
    """The reason why the group cannot be trained; empty if it can."""
    dropped_by: FilterSection | None = None
    """The filter that dropped the group; ``None`` if no filter did."""
    changed: tuple[EpisodeGraph, ...] = ()
    """The episodes whose status the filters have changed."""


def close_group(
    number: int,
    episodes: Sequence[EpisodeGraph],
    *,
    min_episodes: int,
    filters: Sequence[FilterSection],
    context: FilterContext,
) -> ClosedGroup:
    """Return the decision whether the group ``number`` is trained or dropped. ``episodes`` are its episodes, which have
    all ended. The group is dropped if fewer than ``min_episodes`` of them are scored, or if one of ``filters`` drops
    it. ``context`` is passed to the filters."""
    unfiltered_group = ScoredGroup(number=number, episodes=undo_filters(episodes))
    if len(unfiltered_group.scored) < min_episodes:
        return ClosedGroup(group=unfiltered_group, reason=find_commonest_cause(episodes))
    filtered = apply_filters(unfiltered_group, filters, min_episodes=min_episodes, context=context)
    if filtered.dropped:
        return ClosedGroup(group=unfiltered_group, reason=filtered.dropped, dropped_by=filtered.by)
    # Filters do not reorder episodes; they set the status of episodes that they exclude or mask.
    pairs = zip(episodes, filtered.group.episodes, strict=True)
    changed = tuple(after for before, after in pairs if (before.status, before.cause) != (after.status, after.cause))
    return ClosedGroup(group=filtered.group, changed=changed)


def find_commonest_cause(episodes: Sequence[EpisodeGraph]) -> str:
    """Return the most frequent reason of the failed episodes, without the details after the colon; ``too_few_episodes``
    if no episode has failed."""
    causes = Counter(episode.cause.partition(":")[0] for episode in episodes if episode.status is EpisodeStatus.FAILED)
    return causes.most_common(1)[0][0] if causes else "too_few_episodes"


def have_signal(groups: Sequence[ScoredGroup]) -> bool:
    """Return whether a batch of ``groups`` has a training signal: whether rewards that are compared with each other
    differ, within a group or between groups with one episode. A group whose episodes are all masked has no signal,
    whatever its rewards."""
    groups = [group for group in groups if group.scored]
    # Groups with one episode are compared with each other, like one group over the whole batch.
    single_rewards = {reward for group in groups if len(group.counted) == 1 for reward in get_rewards(group.counted)}
    return len(single_rewards) > 1 or any(
        len(set(rewards)) > 1 for group in groups for rewards in comparable_rewards(group.counted)
    )


@dataclass(slots=True, kw_only=True)
class ZeroSignalCounter:
    """A counter of the groups that filters have dropped in a row, since the last group that was kept. It raises an
    error that ends the run after too many of them. The scoring loop owns it."""

    max_dropped: int
    """Number of dropped groups in a row after which the run ends."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups, by reason."""
    num_rewards: int = 0
    """Number of rewards in the dropped groups."""
    reward_sum: float = 0.0
    """The sum of these rewards."""
    lowest: float = math.inf
    """The lowest of these rewards."""
    highest: float = -math.inf
    """The highest of these rewards."""
    advice: dict[str, str] = field(default_factory=dict)
    """The advice of the filters to a user, by reason."""

    @property
    def length(self) -> int:
        """Return the number of groups that were dropped in a row."""
        return self.reasons.total()

    def record_kept(self) -> None:
        """Reset the count, since a group was kept."""
        self.reasons.clear()
        self.num_rewards, self.reward_sum, self.lowest, self.highest = 0, 0.0, math.inf, -math.inf

    def record_dropped(self, reason: str, dropped_by: FilterSection, rewards: Sequence[float]) -> None:
        """Count a group that the filter ``dropped_by`` dropped for ``reason``; ``rewards`` are the rewards of its
        episodes, at least one. Raises :class:`~headrace.base.errors.NothingToLearn` when ``max_dropped`` groups in a
        row were dropped."""
        self.reasons[reason] += 1
        self.num_rewards += len(rewards)
        self.reward_sum += sum(rewards)
        self.lowest, self.highest = min(self.lowest, *rewards), max(self.highest, *rewards)
        self.advice[reason] = dropped_by.advice
        if self.length >= self.max_dropped:
            raise NothingToLearn(self.describe(), remedy=self._remedy())

    def describe(self) -> str:
        """Return a sentence with the number of groups dropped in a row, by reason, and their rewards."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        return f"filters dropped {self.length} groups in a row and kept none: {reasons}; {self._describe_rewards()}"

    def _describe_rewards(self) -> str:
        """Return a clause for a message about the rewards of the dropped groups: their common value, or their range and
        mean."""
        if self.lowest == self.highest:
            return f"all {self.num_rewards} rewards were {self.lowest:g}"
        mean = self.reward_sum / self.num_rewards
        return f"{self.num_rewards} rewards between {self.lowest:g} and {self.highest:g}, {mean:.3g} on average"

    def _remedy(self) -> str:
        """Return the remedy for the error message, according to the most frequent reason for which groups were
        dropped."""
        (reason, _), *_ = self.reasons.most_common(1)
        first = "look at completions and reward; "
        if self.lowest == self.highest:
            first = "look whether the reward function works: it told no answer from another; "
        return f"{first}{self.advice[reason]}; or take the filter away, or raise flow.max_idle_batches; then --resume"
