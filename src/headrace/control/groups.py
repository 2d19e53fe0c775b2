"""Groups while their episodes come in."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.types.episode import Episode, EpisodeStatus
from headrace.types.scored import ScoredGroup
from headrace.types.task import Task


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """A group that is being generated and scored."""

    number: int
    task: Task
    size: int
    """Episodes it will have."""
    episodes: dict[int, Episode] = field(default_factory=dict)
    """Those that have ended (or, where a group is scored as a whole, have finished), by place."""

    @property
    def complete(self) -> bool:
        """Whether all of its episodes are there."""
        return len(self.episodes) == self.size

    @property
    def in_order(self) -> tuple[Episode, ...]:
        """Its episodes by place."""
        return tuple(self.episodes[place] for place in sorted(self.episodes))


def close_group(
    number: int,
    episodes: Sequence[Episode],
    *,
    min_episodes: int,
) -> ScoredGroup | str:
    """A group whose episodes have all ended; or the reason why it cannot be trained."""
    group = ScoredGroup(number=number, episodes=tuple(episodes))
    return group if len(group.scored) >= min_episodes else commonest_cause(episodes)


def commonest_cause(episodes: Sequence[Episode]) -> str:
    """The reason, without its words, that most of the failed episodes give."""
    causes = Counter(episode.cause.partition(":")[0] for episode in episodes if episode.status is EpisodeStatus.FAILED)
    return causes.most_common(1)[0][0] if causes else "too_few_episodes"


def has_signal(group: ScoredGroup) -> bool:
    """Whether its rewards differ: otherwise there is nothing to prefer."""
    rewards = [episode.reward for episode in group.scored if episode.reward is not None]
    return statistics.pvariance(rewards) > 0 if rewards else False
