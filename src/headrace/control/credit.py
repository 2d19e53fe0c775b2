"""From the rewards of a batch to the advantage of each of its episodes, or of their turns.

A row of the mathematics is a share: an episode, or where agents earned each their own, an agent in an episode. Rewards
are compared within (group, role); what a share is credited with goes to its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.outcomes import Floats, labels
from headrace.algo.advantages.tokens import Prpo
from headrace.algo.config import AlgoConfig
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, role_of
from headrace.base.types.scored import Credit, ScoredGroup
from headrace.control.branches import with_branches
from headrace.control.segments import of_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditShare:
    """What is compared with others and credited as one."""

    place: int
    """Of its episode, among those that count in a baseline."""
    episode: EpisodeGraph
    agent: str
    """Whose it is; empty: the whole episode's."""
    reward: float
    turns: tuple[int, ...]
    """Written by the policy under training, in order; none where an agent earned something and never answered: that
    counts in the baseline alone."""

    @property
    def baseline(self) -> tuple[int, str]:
        """Shares of the same one are compared."""
        return self.episode.key.group, role_of(self.agent)

    @property
    def length(self) -> int:
        """Tokens that it answers for."""
        return sum(len(self.episode.turns[turn].tokens) for turn in self.turns)


def credit(algo: AlgoConfig, groups: Sequence[ScoredGroup], *, branch_weight: float = 1.0) -> Sequence[Credit]:
    """The advantage of every episode of the batch that counts in a baseline, in order; not all of them are trained. One
    number, or one per turn where ``algo.advantage.by_turn``, where agents earned each their own, and where turns are
    segments or some of them branches.

    Raises :class:`~headrace.base.errors.ConfigError` for an advantage that cannot tell agents apart.
    """
    return with_branches(algo, groups, _of_episodes(algo, groups), branch_weight)


def _of_episodes(algo: AlgoConfig, groups: Sequence[ScoredGroup]) -> Sequence[Credit]:
    """Without their branches."""
    shares = shares_of(groups)
    apart = any(share.agent for share in shares)
    if apart and algo.advantage.by_critic:
        raise ConfigError(
            f"algo.advantage={algo.advantage.kind!r} credits samples by a critic, and the environment returns "
            "agent_rewards: agents that share a sample could not be told apart",
            remedy="choose another algo.advantage, or return one reward for the episode",
        )
    scores = Outcomes(
        rewards_E=np.array([share.reward for share in shares], np.float64),
        groups_E=labels([share.baseline for share in shares]),
        lengths_E=np.array([share.length for share in shares], np.int64),
        parts_EK=None if apart else _parts_EK([share.episode for share in shares]),
    )
    if algo.advantage.by_turn:
        of_turns = _of_turns(algo, shares, scores)
    elif isinstance(algo.advantage, Prpo):
        of_turns = of_segments(algo, shares, scores)
    else:
        credit_E = algo.credit_of_episodes(scores).tolist()
        if not apart:
            return [float(advantage) for advantage in credit_E]
        of_turns = [dict.fromkeys(share.turns, advantage) for share, advantage in zip(shares, credit_E, strict=True)]
    counted = [episode for group in groups for episode in group.counted]
    credits = [[0.0] * len(episode.turns) for episode in counted]
    for share, by_turn in zip(shares, of_turns, strict=True):
        for turn, advantage in by_turn.items():
            credits[share.place][turn] = advantage
    return credits


def shares_of(groups: Sequence[ScoredGroup]) -> list[CreditShare]:
    """Those of every episode that counts in a baseline. Where an episode of a group says what each agent earned, one
    that does not says that all of them earned the same."""
    counted = [(episode, group) for group in groups for episode in group.counted]
    apart = {group.number for episode, group in counted if episode.agent_rewards}
    shares: list[CreditShare] = []
    for place, (episode, group) in enumerate(counted):
        assert episode.reward is not None
        turns = _written(episode)
        by_agent: dict[str, list[int]] = {}
        if group.number in apart:
            for turn in turns:
                by_agent.setdefault(episode.turns[turn].author, []).append(turn)
            rewards = episode.shares if episode.agent_rewards else dict.fromkeys(by_agent, episode.reward)
        else:
            by_agent[""] = turns or [len(episode.turns) - 1]  # the last one stands for them
            rewards = {"": episode.reward}
        shares += [
            CreditShare(place=place, episode=episode, agent=agent, reward=reward, turns=tuple(by_agent.get(agent, ())))
            for agent, reward in rewards.items()
        ]
    return shares


def _parts_EK(episodes: Sequence[EpisodeGraph]) -> Floats | None:
    """The components of the rewards; ``None`` where there are none to tell apart."""
    names = [list(episode.parts) for episode in episodes]
    if not names or not names[0] or any(each != names[0] for each in names):
        return None
    return np.array([list(episode.parts.values()) for episode in episodes], np.float64)


def _of_turns(algo: AlgoConfig, shares: Sequence[CreditShare], scores: Outcomes) -> list[dict[int, float]]:
    """A row for each turn of a share: it earned what it is said to have earned, and the last one what is left of the
    share's (shaped) reward. Its state is what was given to the policy before it."""
    shaped_E = algo.shaped(scores).rewards_E
    rewards: list[float] = []
    states: list[object] = []
    for share, reward in zip(shares, shaped_E.tolist(), strict=True):
        earned = [share.episode.turns[turn].reward or 0.0 for turn in share.turns]
        if earned:
            earned[-1] += reward - sum(earned)
        rewards += earned
        states += [_state(share.episode, turn, place) for place, turn in enumerate(share.turns)]
    owners = np.repeat(np.arange(len(shares)), [len(share.turns) for share in shares])
    credit_R = algo.advantage(
        Outcomes(
            rewards_E=np.array(rewards, np.float64),
            groups_E=scores.groups_E[owners],
            episodes_E=owners,
            states_E=labels(states),
        )
    ).tolist()
    numbers = iter(credit_R)
    return [{turn: float(next(numbers)) for turn in share.turns} for share in shares]


def _written(episode: EpisodeGraph) -> list[int]:
    """The turns that the policy under training wrote, those of branches aside."""
    own = [index for index, turn in enumerate(episode.turns) if not turn.untrained and turn.branch is None]
    return [index for index in own if episode.turns[index].tokens.sampled_T.any()]


def _state(episode: EpisodeGraph, index: int, place: int) -> object:
    """What was observed before a turn: the tokens that were given between it and the turn before it. Where none were,
    its place among the turns."""
    given: list[bytes] = []
    at = episode.turns[index].parent
    while at is not None and not episode.turns[at].tokens.sampled_T.any():
        given.append(episode.turns[at].tokens.ids_T.tobytes())
        at = episode.turns[at].parent
    return tuple(given) or place
