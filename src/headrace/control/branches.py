"""Credit of branches: the branches of one pivot are compared with each other, apart from the groups of episodes. A
pivot is a place within a failed episode; its branches are continuations that were sampled again from there.

There are two streams, each with a reduction of its own: loss = loss of the episodes + λ · loss of the branches. A loss
is proportional to its advantages, so the advantages are scaled to give this sum under the common denominator of a step.
Source: Guo et al. (DEEP-GRPO), arXiv 2602.14169, the dual-stream objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.advantages.outcomes import labels
from headrace.algo.config import AlgoConfig
from headrace.algo.reductions import TokenMean
from headrace.base.types.episode import EpisodeGraph, EpisodeStatus
from headrace.base.types.scored import Credit, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBranch:
    """A branch that carries loss, as a row of the comparison of branches."""

    place: int
    """The index of its episode among the episodes of the batch that count in a baseline."""
    pivot: int
    """The number of the pivot from which it starts."""
    reward: float
    """The reward of the whole branch."""
    turns: tuple[int, ...]
    """The indices of its turns in the episode, in order."""
    length: int
    """Number of sampled tokens from the start of the episode to the end of the branch."""


def with_branches(
    algo: AlgoConfig, groups: Sequence[ScoredGroup], credits: Sequence[Credit], weight: float
) -> Sequence[Credit]:  # fmt: skip
    """Return ``credits``, the credit of each episode of ``groups`` that counts in a baseline, with the advantages of
    the branches added: one number per turn for every episode, or ``credits`` itself if there are no branches. ``algo``
    compares the branches of one pivot with each other; ``weight`` is λ."""
    episodes = [episode for group in groups for episode in group.counted]
    branches = [branch for place, episode in enumerate(episodes) for branch in trained_branches(place, episode)]
    if not branches:
        return credits
    credit_B = algo.credit(
        Outcomes(
            rewards_E=np.array([branch.reward for branch in branches], np.float64),
            groups_E=labels([(branch.place, branch.pivot) for branch in branches]),
            lengths_E=np.array([branch.length for branch in branches], np.int64),
        )
    )
    of_episodes, of_branches = _scales(algo, episodes, branches)
    scaled: list[list[float]] = []
    for episode, credit in zip(episodes, credits, strict=True):
        by_turn = [credit] * len(episode.turns) if isinstance(credit, float) else credit
        scaled.append([of_episodes * advantage for advantage in by_turn])
    for branch, advantage in zip(branches, credit_B.tolist(), strict=True):
        for turn in branch.turns:
            scaled[branch.place][turn] = weight * of_branches * advantage
    return scaled


def trained_branches(place: int, episode: EpisodeGraph) -> list[TrainedBranch]:
    """Return the branches of an episode that carry loss. ``place`` is the index of the episode among those that count
    in a baseline."""
    turns_of: dict[tuple[int, int], list[int]] = {}
    for index, turn in enumerate(episode.turns):
        if turn.branch is not None and turn.branch.reward is not None:
            turns_of.setdefault((turn.branch.pivot, turn.branch.number), []).append(index)
    branches: list[TrainedBranch] = []
    for (pivot, _), turns in turns_of.items():
        name = episode.turns[turns[0]].branch
        assert name is not None
        assert name.reward is not None
        before = episode.path(turns[0])[:-1]
        length = sum(episode.turns[turn].tokens.num_sampled for turn in (*before, *turns))
        branches.append(TrainedBranch(place=place, pivot=pivot, reward=name.reward, turns=tuple(turns), length=length))
    return branches


def _scales(
    algo: AlgoConfig, episodes: Sequence[EpisodeGraph], branches: Sequence[TrainedBranch]
) -> tuple[float, float]:
    """Return the factor for the advantages of the episodes and the factor for those of the branches. With them, each
    stream gets its own mean although both share the denominator of the step."""
    trained = [episode.status is EpisodeStatus.SCORED for episode in episodes]
    if not isinstance(algo.reduction, TokenMean):  # sums over sequences, a branch being one
        num_branches = sum(trained[branch.place] for branch in branches)
        return 1.0, sum(trained) / max(1, num_branches)
    own = branch_tokens = 0
    for episode in (episode for episode, is_trained in zip(episodes, trained, strict=True) if is_trained):
        for turn in (turn for turn in episode.turns if not turn.untrained):
            sampled = turn.tokens.num_sampled
            own += 0 if turn.branch else sampled
            branch_tokens += sampled if turn.branch else 0
    both = own + branch_tokens
    return both / max(1, own), both / max(1, branch_tokens)
