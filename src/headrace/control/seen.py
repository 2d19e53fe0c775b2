"""What the episodes of a batch come to, in columns: each of them is looked at once, when its batch has just been put
together. Later they have left the processor's caches, and to look at them costs more than all that is made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.base.types.episode import EpisodeGraph, EpisodeStatus, StopReason
from headrace.base.types.scored import ScoredGroup
from headrace.flow.filters import compared


@dataclass(slots=True, kw_only=True)
class EpisodeColumns:
    """Some episodes, or the shares of them that one agent had: a column each."""

    lengths: list[int] = field(default_factory=list)
    """Sampled tokens."""
    turns: list[int] = field(default_factory=list)
    """Sampled ones."""
    rewards: list[float] = field(default_factory=list)
    """Of those that have one."""

    def add(self, others: EpisodeColumns) -> None:
        """Those too."""
        self.lengths += others.lengths
        self.turns += others.turns
        self.rewards += others.rewards


@dataclass(slots=True, kw_only=True)
class BatchStats:
    """The episodes of some groups that are trained, without their branches."""

    episodes: list[EpisodeGraph] = field(default_factory=list)
    """Group after group."""
    told: EpisodeColumns = field(default_factory=EpisodeColumns)
    sizes: list[int] = field(default_factory=list)
    """How many of the episodes each group has."""
    ends_s: list[float] = field(default_factory=list)
    """When those of the groups that ended in this life of the run did so, trained or not."""
    equal: list[bool] = field(default_factory=list)
    """Of each group of several: whether all rewards that are compared with each other are equal."""
    truncated: int = 0
    """Episodes of which a turn was cut off at its length."""
    authors: set[str] = field(default_factory=set)
    """Whose turns were sampled."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """The components of their rewards, where there are several."""


def look_at(groups: Iterable[ScoredGroup]) -> BatchStats:  # gate: nesting - a call takes longer than a look at a turn
    """The groups of a batch."""
    seen = BatchStats()
    rewards, lengths, num_turns, authors = seen.told.rewards, seen.told.lengths, seen.told.turns, seen.authors
    scored, too_long = EpisodeStatus.SCORED, StopReason.LENGTH
    for group in groups:
        first, first_reward, apart = len(lengths), len(rewards), False
        for episode in group.episodes:
            if episode.ended_s is not None:
                seen.ends_s.append(episode.ended_s)
            if episode.status is not scored:
                apart = True
                continue
            seen.episodes.append(episode)
            if episode.reward is not None:
                rewards.append(episode.reward)
            if episode.agent_rewards:
                apart = True
            if episode.parts:
                seen.parts.append(episode.parts)
            length = turns = cut = 0
            for turn in episode.turns:
                reason = turn.stop_reason
                if reason is not None and turn.branch is None:
                    length += len(turn.tokens.ids_T)
                    turns += 1
                    cut |= reason is too_long
                    authors.add(turn.author)
            lengths.append(length)
            num_turns.append(turns)
            seen.truncated += cut
        seen.sizes.append(len(lengths) - first)
        if len(group.episodes) > 1:
            alike = compared(group.counted) if apart else [rewards[first_reward:]]
            seen.equal.append(all(len(set(of_role)) <= 1 for of_role in alike))
    return seen
