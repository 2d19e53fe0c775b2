"""What a filter is: a pure function of one scored group. It keeps it, keeps some of its episodes, or drops it.

Filters stand in a row; each sees what the one before it left. A dropped group frees its slot at once and another is
admitted in its place, so a batch has exactly its size whatever the filters do. An episode that leaves a group that is
kept is

    left out   as if it had never been sampled: advantages are taken over the others
    masked     its reward counts in the baseline of its group, its tokens carry no loss

Every reason is counted: of groups and of episodes, with their tokens, in the ledger.
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
    """What a filter may look at beside the group."""

    decode: Callable[[Sequence[int]], str]
    """Ids to text."""
    seed: int
    """The run's: draws are a function of it and of the number of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a filter says of a group; :data:`KEEP` where it has nothing to say."""

    reason: str = ""
    """Why something leaves: a word that is counted. Empty where nothing does."""
    drop: bool = False
    """Whether the whole group leaves."""
    leave_out: frozenset[int] = frozenset()
    """Places of the scored episodes that leave it."""
    mask: frozenset[int] = frozenset()
    """Places of the scored episodes that stay in its baseline only."""
    keep_masked: bool = False
    """Whether the group stays even where all of its episodes are masked, and trains nothing."""


KEEP = Verdict()


class FilterSection(Section):
    """A filter and its settings."""

    advice: ClassVar[str]
    """What a user whose groups are all dropped by it may do."""

    def __call__(self, group: ScoredGroup, context: FilterContext) -> Verdict:
        """What becomes of ``group``, which has at least one episode that is scored, or masked by a filter before."""
        raise NotImplementedError

    @property
    def first(self) -> int | None:
        """How many episodes that have finished make the group; the others are withdrawn then. ``None``: all."""
        return None

    def episodes_left(self, num_episodes: int) -> int:
        """How many of a group's ``num_episodes`` can be left when all goes well."""
        return num_episodes

    def problem(self, num_episodes: int, min_episodes: int) -> tuple[str, str] | None:
        """Why it cannot work in groups that come to it with ``min_episodes`` to ``num_episodes`` episodes, and the
        remedy; ``None`` where it can."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """What the filters have left of a group."""

    group: ScoredGroup
    """With the status that each episode has now; as it was where it is dropped."""
    dropped: str = ""
    """Why the group leaves; empty: it stays."""
    by: FilterSection | None = None
    """The filter that dropped it; ``None`` where none did."""


def apply_filters(
    group: ScoredGroup, filters: Sequence[FilterSection], *, min_episodes: int, context: FilterContext
) -> Filtered:
    """Ask one filter after the other. A group of which they leave fewer than ``min_episodes`` in the baseline, or none
    to train, is dropped for the reason of the last of them. A verdict may keep a group of which none is left to
    train."""
    left = group
    for each in filters:
        verdict = each(left, context)
        if verdict.drop:
            return Filtered(group=group, dropped=verdict.reason, by=each)
        if not verdict.leave_out and not verdict.mask:
            continue
        left = _without(left, verdict)
        if len(left.counted) < min_episodes or not (left.scored or verdict.keep_masked):
            return Filtered(group=group, dropped=verdict.reason, by=each)
    return Filtered(group=left)


def _without(group: ScoredGroup, verdict: Verdict) -> ScoredGroup:
    fates = dict.fromkeys(verdict.leave_out, EpisodeStatus.LEFT_OUT) | dict.fromkeys(verdict.mask, EpisodeStatus.MASKED)
    return replace(
        group,
        episodes=tuple(
            replace(episode, status=fates[episode.key.place], cause=verdict.reason)
            if episode.key.place in fates
            else episode
            for episode in group.episodes
        ),
    )


def reopened(episodes: Sequence[EpisodeGraph]) -> tuple[EpisodeGraph, ...]:
    """Episodes as they were before filters saw them: what a crash interrupts is filtered again, as a whole."""
    undone = (EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED)
    return tuple(
        replace(episode, status=EpisodeStatus.SCORED, cause="")
        if episode.status in undone and episode.reward is not None
        else episode
        for episode in episodes
    )


def rewards_of(episodes: Sequence[EpisodeGraph]) -> list[float]:
    """Their rewards, in order; those without one are passed over."""
    return [episode.reward for episode in episodes if episode.reward is not None]


def compared(episodes: Sequence[EpisodeGraph]) -> list[list[float]]:
    """The rewards of a group, as they are compared with each other: those of its episodes or, where agents earned each
    their own, those of every role that is trained."""
    if not any(episode.agent_rewards for episode in episodes):
        return [rewards_of(episodes)]
    by_role: dict[str, list[float]] = {}
    for episode in episodes:
        for agent, reward in episode.shares.items():
            by_role.setdefault(role_of(agent), []).append(reward)
    return list(by_role.values())


def as_tables(value: Any) -> Any:
    """One filter or several, where a name alone stands for its table.

    >>> as_tables("zero_variance"), as_tables(["length", {"kind": "redundancy", "keep": 6}])
    (({'kind': 'zero_variance'},), ({'kind': 'length'}, {'kind': 'redundancy', 'keep': 6}))
    """
    if isinstance(value, str) and value == "none":
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    return tuple({"kind": part} if isinstance(part, str) else part for part in listed)
