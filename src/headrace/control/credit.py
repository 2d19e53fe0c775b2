"""The credit of a batch: the advantages of its episodes, or of their turns, computed from the rewards.

A *share* is one row of the computation: an episode or, if agents have rewards of their own, one agent in an episode.
Rewards are compared within shares of the same group and role, and the advantage of a share is assigned to its turns. An
episode *counts in a baseline* if it is scored or masked.

Shape suffixes: E shares, K components of the reward, R turns of all shares, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.outcomes import Floats, labels
from headrace.algo.advantages.tokens import Prpo
from headrace.algo.config import AlgoConfig
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, get_role
from headrace.base.types.scored import Credit, ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.control.branches import add_branch_credits


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditShare:
    """One row of the computation of advantages: an episode, or one agent in an episode. Its reward is compared with the
    rewards of other shares."""

    episode_index: int
    """The index of the share's episode among the episodes of the batch that count in a baseline."""
    episode: EpisodeGraph
    """The episode to which the share belongs."""
    agent: str
    """The name of the agent; empty if the share is the whole episode."""
    reward: float
    """The reward of the episode, or of the agent."""
    turns: tuple[int, ...]
    """The indices of the share's turns that the trained policy wrote, in order. Empty for an agent that has a reward
    and wrote no turn; then the share only counts in the baseline."""

    @property
    def baseline(self) -> tuple[int, str]:
        """Return the number of the share's group and the share's role. Shares with the same pair are compared with each
        other."""
        return self.episode.key.group, get_role(self.agent)

    @property
    def length(self) -> int:
        """Return the number of tokens in the share's turns."""
        return sum(len(self.episode.turns[turn].tokens) for turn in self.turns)


def credit(algo: AlgoConfig, groups: Sequence[ScoredGroup], *, branch_weight: float = 1.0) -> Sequence[Credit]:
    """Return the credit of every episode of ``groups``, the groups of a batch, that counts in a baseline, in order.
    Masked episodes, which are not trained, are included.

    ``algo`` are the settings of the algorithm, which computes the advantages. An episode's credit is one advantage, or
    one for each of its turns if ``algo.advantage.by_turn`` is set, if agents have rewards of their own, or if turns are
    segments or belong to branches. ``branch_weight`` is the weight of the loss of branches. Raises
    :class:`~headrace.base.errors.ConfigError` for an advantage that cannot tell agents apart.
    """
    return add_branch_credits(algo, groups, _episode_credits(algo, groups), branch_weight)


def _episode_credits(algo: AlgoConfig, groups: Sequence[ScoredGroup]) -> Sequence[Credit]:
    """Return the credit of every episode that counts in a baseline, as :func:`credit` does, but without the credit of
    branches."""
    shares = split_into_shares(groups)
    by_agent = any(share.agent for share in shares)  # some agents have their own rewards
    if by_agent and algo.advantage.by_critic:
        raise ConfigError(
            f"algo.advantage={algo.advantage.kind!r} credits samples by a critic, and the environment returns "
            "agent_rewards: agents that share a sample could not be told apart",
            remedy="choose another algo.advantage, or return one reward for the episode",
        )
    scores = Outcomes(
        rewards_E=np.array([share.reward for share in shares], np.float64),
        groups_E=labels([share.baseline for share in shares]),
        lengths_E=np.array([share.length for share in shares], np.int64),
        parts_EK=None if by_agent else _parts_EK([share.episode for share in shares]),
    )
    if algo.advantage.by_turn:
        credits_by_share = _turn_credits(algo, shares, scores)
    elif isinstance(algo.advantage, Prpo):
        credits_by_share = _segment_credits(algo, shares, scores)
    else:
        credit_E = algo.credit_of_episodes(scores).tolist()
        if not by_agent:
            return [float(advantage) for advantage in credit_E]
        credits_by_share = [
            dict.fromkeys(share.turns, advantage) for share, advantage in zip(shares, credit_E, strict=True)
        ]
    counted = [episode for group in groups for episode in group.counted]
    credits = [[0.0] * len(episode.turns) for episode in counted]
    for share, by_turn in zip(shares, credits_by_share, strict=True):
        for turn, advantage in by_turn.items():
            credits[share.episode_index][turn] = advantage
    return credits


def split_into_shares(groups: Sequence[ScoredGroup]) -> list[CreditShare]:
    """Return the shares of every episode of ``groups`` that counts in a baseline. If an episode of a group has rewards
    by agent, each other episode of the group is also split by agent; if that episode has no rewards by agent, each of
    its agents gets the reward of the episode."""
    counted = [(episode, group) for group in groups for episode in group.counted]
    split_groups = {group.number for episode, group in counted if episode.agent_rewards}
    shares: list[CreditShare] = []
    for episode_index, (episode, group) in enumerate(counted):
        assert episode.reward is not None
        turns = _trainable_turns(episode)
        by_agent: dict[str, list[int]] = {}
        if group.number in split_groups:
            for turn in turns:
                by_agent.setdefault(episode.turns[turn].author, []).append(turn)
            rewards = episode.shares if episode.agent_rewards else dict.fromkeys(by_agent, episode.reward)
        else:
            # without a trainable turn, the last turn represents the episode
            by_agent[""] = turns or [len(episode.turns) - 1]
            rewards = {"": episode.reward}
        shares += [
            CreditShare(
                episode_index=episode_index,
                episode=episode,
                agent=agent,
                reward=reward,
                turns=tuple(by_agent.get(agent, ())),
            )
            for agent, reward in rewards.items()
        ]
    return shares


def _parts_EK(episodes: Sequence[EpisodeGraph]) -> Floats | None:
    """Return the components of the rewards as a matrix: one row for each episode and one column for each component.
    ``None`` if there are no components, or if episodes have different components."""
    names = [list(episode.parts) for episode in episodes]
    if not names or not names[0] or any(each != names[0] for each in names):
        return None
    return np.array([list(episode.parts.values()) for episode in episodes], np.float64)


def _turn_credits(algo: AlgoConfig, shares: Sequence[CreditShare], scores: Outcomes) -> list[dict[int, float]]:
    """Return, for each share, the advantage of each of its turns, by the index of the turn, for an advantage that
    compares turns. ``algo`` computes the advantages, and ``scores`` has one row for each of ``shares``.

    The reward of a turn is the reward that the environment returned for it; the last turn of a share also gets the rest
    of the share's (shaped) reward. Turns are compared by their state, which is the observation before the turn.
    """
    shaped_E = algo.shape_rewards(scores).rewards_E
    rewards: list[float] = []
    states: list[object] = []
    for share, reward in zip(shares, shaped_E.tolist(), strict=True):
        turn_rewards = [share.episode.turns[turn].reward or 0.0 for turn in share.turns]
        # The rewards of a share's turns must add up to the reward of the share.
        if turn_rewards:
            turn_rewards[-1] += reward - sum(turn_rewards)
        rewards += turn_rewards
        states += [_state_key(share.episode, turn, position) for position, turn in enumerate(share.turns)]
    owners = np.repeat(np.arange(len(shares)), [len(share.turns) for share in shares])
    credit_R = algo.advantage(
        Outcomes(
            rewards_E=np.array(rewards, np.float64),
            groups_E=scores.groups_E[owners],
            episodes_E=owners,
            states_E=labels(states),
        )
    ).tolist()
    advantages = iter(credit_R)
    return [{turn: float(next(advantages)) for turn in share.turns} for share in shares]


def _segment_credits(algo: AlgoConfig, shares: Sequence[CreditShare], scores: Outcomes) -> list[dict[int, float]]:
    """Return, for each share, the advantage of each of its segments, by the index of the turn, since each turn is one
    segment. ``algo`` computes the advantages, and ``scores`` has one row for each of ``shares``.

    The formula (:class:`~headrace.algo.advantages.tokens.Prpo`) is defined on tokens; all tokens of a segment get the
    same advantage.
    """
    shaped = algo.shape_rewards(scores)
    segments = [(share.episode.turns[turn], turn) for share in shares for turn in share.turns]
    counts = [len(turn.tokens) for turn, _ in segments]
    credit_N = algo.advantage(
        Outcomes(
            rewards_E=shaped.rewards_E,
            groups_E=scores.groups_E,
            lengths_E=scores.lengths_E,
            process_N=np.repeat([turn.process or 0.0 for turn, _ in segments], counts),
            segments_N=np.repeat([index for _, index in segments], counts),
        )
    )
    starts = iter(np.cumsum([0, *counts]).tolist())
    credits: list[dict[int, float]] = []
    for share in shares:
        first_tokens = [(turn, next(starts)) for turn in share.turns]
        credits.append(
            {turn: float(credit_N[start]) for turn, start in first_tokens if len(share.episode.turns[turn].tokens)}
        )
    return credits


def _trainable_turns(episode: EpisodeGraph) -> list[int]:
    """Return the indices of the turns of ``episode`` that the trained policy wrote, without turns of branches and turns
    that carry no loss."""
    return [
        index
        for index, turn in enumerate(episode.turns)
        if not turn.untrained and turn.branch is None and turn.tokens.any_sampled
    ]


def _state_key(episode: EpisodeGraph, turn: int, position: int) -> object:
    """Return a key for the observation before a turn: turns of a group with equal keys are compared. ``turn`` is the
    index of the turn in ``episode``. The key consists of the tokens between the turn and the previous sampled turn; if
    there are none, it is ``position``, the position of the turn in its share."""
    observed: list[bytes] = []
    index = episode.turns[turn].parent
    while index is not None and not episode.turns[index].tokens.sampled_T.any():
        observed.append(episode.turns[index].tokens.ids_T.tobytes())
        index = episode.turns[index].parent
    return tuple(observed) or position


def make_segmenter(algo: AlgoConfig) -> Callable[[Tokens], Sequence[int]] | None:
    """Return the function that cuts a turn into segments, with the settings ``algo``. It receives the tokens of a turn
    and returns the index of the first token of each segment except the first one; these are the tokens with the highest
    entropies. Return ``None`` if the advantage does not use segments."""
    advantage = algo.advantage
    if not isinstance(advantage, Prpo):
        return None
    return lambda tokens: () if tokens.entropies_T is None else advantage.starts(tokens.entropies_T)
