"""Groups while their episodes come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.flow.filters import REDUNDANT, FilterContext, FilterSection, apply_filters, compared, reopened, rewards_of
from headrace.rollout import Withdrawal


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that is being generated and scored."""

    number: int
    task: Task
    size: int
    """Episodes it will have."""
    first: int | None = None
    """How many that have finished are enough: the others are withdrawn then. ``None``: all of them are needed."""
    episodes: dict[int, EpisodeGraph] = field(default_factory=dict)
    """Those that have ended (or, where a group is scored as a whole, have finished), by place."""
    running: dict[int, Withdrawal] = field(default_factory=dict)
    """How to withdraw those that run, by place."""
    num_finished: int = 0
    """Episodes that came to their end and belong to the group."""

    @property
    def complete(self) -> bool:
        """Whether all of its episodes are there."""
        return len(self.episodes) == self.size

    @property
    def has_enough(self) -> bool:
        """Whether those that have finished are enough."""
        return self.first is not None and self.num_finished >= self.first

    @property
    def in_order(self) -> tuple[EpisodeGraph, ...]:
        """Its episodes by place."""
        return tuple(self.episodes[place] for place in sorted(self.episodes))

    def finished(self, episode: EpisodeGraph) -> None:
        """An episode has come to its end. It belongs to the group unless enough did before it; the last that belongs
        sends the others away."""
        if self.has_enough:
            episode.status, episode.cause = EpisodeStatus.LEFT_OUT, REDUNDANT
            return
        self.num_finished += 1
        if self.has_enough:
            for withdrawal in self.running.values():
                withdrawal.withdraw(REDUNDANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What becomes of a group whose episodes have all ended."""

    group: ScoredGroup
    """As the filters have left it."""
    reason: str = ""
    """Why it cannot be trained; empty where it can."""
    dropped_by: FilterSection | None = None
    """The filter that dropped it; ``None`` where none did."""
    changed: tuple[EpisodeGraph, ...] = ()
    """The episodes that have another status than the one they ended with."""


def close_group(
    number: int,
    episodes: Sequence[EpisodeGraph],
    *,
    min_episodes: int,
    filters: Sequence[FilterSection],
    context: FilterContext,
) -> Closed:
    """Look at a group whose episodes have all ended, and ask the filters."""
    whole = ScoredGroup(number=number, episodes=reopened(episodes))
    if len(whole.scored) < min_episodes:
        return Closed(group=whole, reason=commonest_cause(episodes))
    left = apply_filters(whole, filters, min_episodes=min_episodes, context=context)
    if left.dropped:
        return Closed(group=whole, reason=left.dropped, dropped_by=left.by)
    both = zip(episodes, left.group.episodes, strict=True)
    changed = tuple(now for then, now in both if (then.status, then.cause) != (now.status, now.cause))
    return Closed(group=left.group, changed=changed)


def commonest_cause(episodes: Sequence[EpisodeGraph]) -> str:
    """The reason, without its words, that most of the failed episodes give."""
    causes = Counter(episode.cause.partition(":")[0] for episode in episodes if episode.status is EpisodeStatus.FAILED)
    return causes.most_common(1)[0][0] if causes else "too_few_episodes"


def have_signal(groups: Sequence[ScoredGroup]) -> bool:
    """Whether rewards that are compared differ within a group, or between groups of one: otherwise there is nothing to
    prefer. A group of which every episode is masked trains nothing, whatever its rewards."""
    groups = [group for group in groups if group.scored]
    alone = {reward for group in groups if len(group.counted) == 1 for reward in rewards_of(group.counted)}
    return len(alone) > 1 or any(len(set(rewards)) > 1 for group in groups for rewards in compared(group.counted))
