"""Groups whose episodes are still running or being scored, and the count of groups that filters drop in a row. A group
holds the attempts (episodes) at one task; the *place* of an episode is its index in the group, from 0."""

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
    rewards_of,
    unfiltered,
)
from headrace.rollout import Withdrawal


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that is being generated and scored. The rollout loop makes it and runs its episodes; the scoring loop
    collects them and closes it."""

    number: int
    """The number of the group in the run."""
    task: Task
    """The task that all of its episodes attempt."""
    size: int
    """Number of episodes that the group will have."""
    first: int | None = None
    """Number of finished episodes that are enough, so that the others are withdrawn; ``None``: all are needed."""
    episodes: dict[int, EpisodeGraph] = field(default_factory=dict)
    """The episodes that have ended, by their place in the group (from 0); also those that have finished and wait to be
    scored, if the group is scored as a whole."""
    running: dict[int, Withdrawal] = field(default_factory=dict)
    """For each episode that runs, by place, the handle that withdraws it."""
    num_finished: int = 0
    """Number of episodes that came to their end by themselves and belong to the group."""

    @property
    def complete(self) -> bool:
        """Return whether all episodes of the group are collected."""
        return len(self.episodes) == self.size

    @property
    def has_enough(self) -> bool:
        """Return whether enough episodes have finished, so that the others are not needed; never without ``first``."""
        return self.first is not None and self.num_finished >= self.first

    @property
    def in_order(self) -> tuple[EpisodeGraph, ...]:
        """Return the collected episodes of the group, in the order of their places."""
        return tuple(self.episodes[place] for place in sorted(self.episodes))

    def finished(self, episode: EpisodeGraph) -> None:
        """Count an episode that has come to its end. If enough others finished before it, mark it as left out. If it is
        the last one that was needed, withdraw the episodes that still run."""
        if self.has_enough:
            episode.status, episode.cause = EpisodeStatus.LEFT_OUT, REDUNDANT
            return
        self.num_finished += 1
        # This episode may be the last that was needed: then the others need not run on.
        if self.has_enough:
            for withdrawal in self.running.values():
                withdrawal.withdraw(REDUNDANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedGroup:
    """The decision about a group whose episodes have all ended: it is trained or dropped."""

    group: ScoredGroup
    """The group after the filters; as it was before them if it is dropped."""
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
    """Decide whether a group whose ``episodes`` have all ended is trained or dropped. It is dropped if fewer than
    ``min_episodes`` of them are scored, or if the filters drop it."""
    whole = ScoredGroup(number=number, episodes=unfiltered(episodes))
    if len(whole.scored) < min_episodes:
        return ClosedGroup(group=whole, reason=commonest_cause(episodes))
    left = apply_filters(whole, filters, min_episodes=min_episodes, context=context)
    if left.dropped:
        return ClosedGroup(group=whole, reason=left.dropped, dropped_by=left.by)
    # The filters return the episodes in the same order, with a new status where they left one out or masked it.
    both = zip(episodes, left.group.episodes, strict=True)
    changed = tuple(now for then, now in both if (then.status, then.cause) != (now.status, now.cause))
    return ClosedGroup(group=left.group, changed=changed)


def commonest_cause(episodes: Sequence[EpisodeGraph]) -> str:
    """Return the reason of most of the failed episodes, without the words that follow it; ``too_few_episodes`` if none
    has failed."""
    causes = Counter(episode.cause.partition(":")[0] for episode in episodes if episode.status is EpisodeStatus.FAILED)
    return causes.most_common(1)[0][0] if causes else "too_few_episodes"


def have_signal(groups: Sequence[ScoredGroup]) -> bool:
    """Return whether the groups of a batch give the learner a signal: whether any rewards that are compared with each
    other differ, within a group or between groups with one episode. A group whose episodes are all masked gives no
    signal, whatever its rewards."""
    groups = [group for group in groups if group.scored]
    # Groups of one episode are compared with each other, as one group of the whole batch.
    alone = {reward for group in groups if len(group.counted) == 1 for reward in rewards_of(group.counted)}
    return len(alone) > 1 or any(
        len(set(rewards)) > 1 for group in groups for rewards in comparable_rewards(group.counted)
    )


@dataclass(slots=True, kw_only=True)
class ZeroSignalCounter:
    """Counts the groups that filters dropped since the last group that was kept, and ends the run after too many of
    them. The scoring loop owns it."""

    most: int
    """Number of dropped groups in a row that end the run."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of dropped groups, by reason."""
    num_rewards: int = 0
    """Number of rewards in those groups."""
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

    def kept(self) -> None:
        """Reset the count, since a group was kept."""
        self.reasons.clear()
        self.num_rewards, self.reward_sum, self.lowest, self.highest = 0, 0.0, math.inf, -math.inf

    def dropped(self, reason: str, by: FilterSection, rewards: Sequence[float]) -> None:
        """Count a group that the filter ``by`` dropped for ``reason``; ``rewards`` are those of its episodes, at least
        one. Raises :class:`~headrace.base.errors.NothingToLearn` when ``most`` groups in a row were dropped."""
        self.reasons[reason] += 1
        self.num_rewards += len(rewards)
        self.reward_sum += sum(rewards)
        self.lowest, self.highest = min(self.lowest, *rewards), max(self.highest, *rewards)
        self.advice[reason] = by.advice
        if self.length >= self.most:
            raise NothingToLearn(self.in_words(), remedy=self._remedy())

    def in_words(self) -> str:
        """Return a sentence with the number of groups dropped in a row, by reason, and their rewards."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        return f"filters dropped {self.length} groups in a row and kept none: {reasons}; {self._rewards()}"

    def _rewards(self) -> str:
        """Return a clause, for a message, about the rewards of the dropped groups: that they were equal, or their range
        and mean."""
        if self.lowest == self.highest:
            return f"all {self.num_rewards} rewards were {self.lowest:g}"
        mean = self.reward_sum / self.num_rewards
        return f"{self.num_rewards} rewards between {self.lowest:g} and {self.highest:g}, {mean:.3g} on average"

    def _remedy(self) -> str:
        """Return what the user can do, by the most frequent reason for which groups were dropped."""
        (reason, _), *_ = self.reasons.most_common(1)
        first = "look at completions and reward; "
        if self.lowest == self.highest:
            first = "look whether the reward function works: it told no answer from another; "
        return f"{first}{self.advice[reason]}; or take the filter away, or raise flow.max_idle_batches; then --resume"
