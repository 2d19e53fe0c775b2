"""What the episodes of a batch come to, in columns: each of them is looked at once. They have long left the processor's
caches by then, so that to look at them costs more than anything that is done with what is seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from headrace.flow.filters import compared, rewards_of
from headrace.types.episode import Episode, StopReason
from headrace.types.scored import ScoredGroup

_AGENT_REWARDS = attrgetter("agent_rewards")


@dataclass(slots=True, kw_only=True)
class Told:
    """Some episodes, or the shares of them that one agent had: a column each."""

    lengths: list[int] = field(default_factory=list)
    """Sampled tokens."""
    turns: list[int] = field(default_factory=list)
    """Sampled ones."""
    rewards: list[float] = field(default_factory=list)
    """Of those that have one."""

    def add(self, others: Told) -> None:
        """Those too."""
        self.lengths += others.lengths
        self.turns += others.turns
        self.rewards += others.rewards


@dataclass(slots=True, kw_only=True)
class Seen:
    """The episodes of some groups that are trained, without their branches."""

    episodes: list[Episode] = field(default_factory=list)
    """Group after group."""
    told: Told = field(default_factory=Told)
    sizes: list[int] = field(default_factory=list)
    """How many of the episodes each group has."""
    equal: list[bool] = field(default_factory=list)
    """Of each group of several: whether all rewards that are compared with each other are equal."""
    truncated: int = 0
    """Episodes of which a turn was cut off at its length."""
    authors: set[str] = field(default_factory=set)
    """Whose turns were sampled."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """The components of their rewards, where there are several."""


def look_at(groups: Iterable[ScoredGroup]) -> Seen:
    """The groups of a batch."""
    seen = Seen()
    for group in groups:
        scored = group.scored
        rewards = rewards_of(scored)
        seen.episodes += scored
        seen.sizes.append(len(scored))
        seen.told.rewards += rewards
        if len(group.episodes) > 1:
            apart = len(scored) < len(group.episodes) or any(map(_AGENT_REWARDS, scored))
            alike = compared(group.counted) if apart else [rewards]
            seen.equal.append(all(len(set(of_role)) <= 1 for of_role in alike))
    _look_at_turns(seen)
    return seen


def _look_at_turns(seen: Seen) -> None:
    lengths, num_turns, too_long = seen.told.lengths, seen.told.turns, StopReason.LENGTH
    for episode in seen.episodes:
        length = turns = cut = 0
        for turn in episode.turns:
            reason = turn.stop_reason
            if reason is not None and turn.branch is None:
                length += len(turn.tokens.ids_T)
                turns += 1
                cut |= reason is too_long
                seen.authors.add(turn.author)
        lengths.append(length)
        num_turns.append(turns)
        seen.truncated += cut
        if episode.parts:
            seen.parts.append(episode.parts)
