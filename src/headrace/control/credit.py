"""From the rewards of a batch to the advantage of each of its episodes, or of their turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.outcomes import Floats, labels
from headrace.algo.config import AlgoConfig
from headrace.types.episode import Episode
from headrace.types.scored import Credit, ScoredGroup


def credit(algo: AlgoConfig, groups: Sequence[ScoredGroup]) -> Sequence[Credit]:
    """The advantage of every episode of the batch that counts in a baseline, in order; not all of them are trained. One
    number, or one per turn where ``algo.advantage.by_turn``."""
    episodes = [episode for group in groups for episode in group.counted]
    scores = Outcomes(
        rewards_E=np.array([episode.reward for episode in episodes], np.float64),
        groups_E=np.array([episode.key.group for episode in episodes], np.int64),
        lengths_E=np.array([episode.num_sampled for episode in episodes], np.int64),
        parts_EK=_parts_EK(episodes),
    )
    if algo.advantage.by_turn:
        return _of_turns(algo, episodes, scores)
    return [float(advantage) for advantage in algo.credit_of_episodes(scores)]


def _parts_EK(episodes: Sequence[Episode]) -> Floats | None:
    """The components of the rewards; ``None`` where there are none to tell apart."""
    names = [list(episode.parts) for episode in episodes]
    if not names or not names[0] or any(each != names[0] for each in names):
        return None
    return np.array([list(episode.parts.values()) for episode in episodes], np.float64)


def _of_turns(algo: AlgoConfig, episodes: Sequence[Episode], scores: Outcomes) -> list[Credit]:
    """A row for each turn that the policy wrote: it earned what it is said to have earned, and the last one what is
    left of its episode's (shaped) reward. Its state is what was given to the policy before it."""
    shaped_E = algo.shaped(scores).rewards_E
    written = [_written(episode) for episode in episodes]
    rewards: list[float] = []
    states: list[object] = []
    for episode, turns, reward in zip(episodes, written, shaped_E.tolist(), strict=True):
        earned = [episode.turns[turn].reward or 0.0 for turn in turns]
        earned[-1] += reward - sum(earned)
        rewards += earned
        states += [_state(episode, turn, place) for place, turn in enumerate(turns)]
    owners = np.repeat(np.arange(len(episodes)), [len(turns) for turns in written])
    credit_R = algo.advantage(
        Outcomes(
            rewards_E=np.array(rewards, np.float64),
            groups_E=scores.groups_E[owners],
            episodes_E=owners,
            states_E=labels(states),
        )
    ).tolist()
    numbers = iter(credit_R)
    credits: list[Credit] = []
    for episode, turns in zip(episodes, written, strict=True):
        of_turn = {turn: float(next(numbers)) for turn in turns}
        credits.append([of_turn.get(index, 0.0) for index in range(len(episode.turns))])
    return credits


def _written(episode: Episode) -> list[int]:
    """The turns that the policy under training wrote; where there is none, the last one stands for them."""
    sampled = [index for index, turn in enumerate(episode.turns) if turn.tokens.sampled_T.any() and not turn.untrained]
    return sampled or [len(episode.turns) - 1]


def _state(episode: Episode, index: int, place: int) -> object:
    """What was observed before a turn: the tokens that were given between it and the turn before it. Where none were,
    its place among the turns."""
    given: list[bytes] = []
    at = episode.turns[index].parent
    while at is not None and not episode.turns[at].tokens.sampled_T.any():
        given.append(episode.turns[at].tokens.ids_T.tobytes())
        at = episode.turns[at].parent
    return tuple(given) or place
