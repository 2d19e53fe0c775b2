"""The credit of branches: the branches of one pivot are compared with each other, separately from the groups of
episodes. A pivot is a position within a failed episode; its branches are continuations that were sampled from this
position.

There are two loss terms, each with its own mean: loss = loss of the episodes + λ · loss of the branches. A loss is
proportional to its advantages, so the advantages are scaled such that the common denominator of a step gives this sum.
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
    """A branch that carries loss: one row of the computation of the branches' advantages."""

    episode_index: int
    """The index of the branch's episode among the episodes of the batch that count in a baseline."""
    pivot: int
    """The number of the pivot from which the branch starts."""
    reward: float
    """The reward of the whole branch."""
    turns: tuple[int, ...]
    """The indices of the branch's turns in the episode, in order."""
    length: int
    """Number of sampled tokens from the start of the episode to the end of the branch."""


def add_branch_credits(
    algo: AlgoConfig, groups: Sequence[ScoredGroup], credits: Sequence[Credit], weight: float
) -> Sequence[Credit]:  # fmt: skip
    """Return the credit of each episode of ``groups`` that counts in a baseline, with the advantages of branches: one
    number for each turn of an episode. ``credits`` is the credit of these episodes without branches, and is returned
    unchanged if there are no branches. ``algo`` computes the advantages, and ``weight`` is λ."""
    episodes = [episode for group in groups for episode in group.counted]
    branches = [
        branch
        for episode_index, episode in enumerate(episodes)
        for branch in find_trained_branches(episode_index, episode)
    ]
    if not branches:
        return credits
    credit_B = algo.credit(
        Outcomes(
            rewards_E=np.array([branch.reward for branch in branches], np.float64),
            groups_E=labels([(branch.episode_index, branch.pivot) for branch in branches]),
            lengths_E=np.array([branch.length for branch in branches], np.int64),
        )
    )
    episode_scale, branch_scale = _compute_scales(algo, episodes, branches)
    scaled: list[list[float]] = []
    for episode, credit in zip(episodes, credits, strict=True):
        by_turn = [credit] * len(episode.turns) if isinstance(credit, float) else credit
        scaled.append([episode_scale * advantage for advantage in by_turn])
    for branch, advantage in zip(branches, credit_B.tolist(), strict=True):
        for turn in branch.turns:
            scaled[branch.episode_index][turn] = weight * branch_scale * advantage
    return scaled


def find_trained_branches(episode_index: int, episode: EpisodeGraph) -> list[TrainedBranch]:
    """Return the branches of ``episode`` that carry loss. ``episode_index`` is the index of the episode among the
    episodes of the batch that count in a baseline."""
    turns_by_branch: dict[tuple[int, int], list[int]] = {}
    for index, turn in enumerate(episode.turns):
        if turn.branch is not None and turn.branch.reward is not None:
            turns_by_branch.setdefault((turn.branch.pivot, turn.branch.number), []).append(index)
    branches: list[TrainedBranch] = []
    for (pivot, _), turns in turns_by_branch.items():
        branch = episode.turns[turns[0]].branch
        assert branch is not None
        assert branch.reward is not None
        prefix = episode.path(turns[0])[:-1]
        length = sum(episode.turns[turn].tokens.num_sampled for turn in (*prefix, *turns))
        branches.append(
            TrainedBranch(
                episode_index=episode_index, pivot=pivot, reward=branch.reward, turns=tuple(turns), length=length
            )
        )
    return branches


def _compute_scales(
    algo: AlgoConfig, episodes: Sequence[EpisodeGraph], branches: Sequence[TrainedBranch]
) -> tuple[float, float]:
    """Return the factor for the advantages of ``episodes`` and the factor for the advantages of ``branches``. With
    these factors, each loss term is its own mean although both share the denominator of the step. This is exact for
    reductions in which the weight of a token does not depend on the other tokens of its episode or prompt."""
    trained = [episode.status is EpisodeStatus.SCORED for episode in episodes]
    if not isinstance(algo.reduction, TokenMean):  # reductions over sequences, where each branch is one sequence
        num_branches = sum(trained[branch.episode_index] for branch in branches)
        return 1.0, sum(trained) / max(1, num_branches)
    episode_tokens = branch_tokens = 0
    for episode in (episode for episode, is_trained in zip(episodes, trained, strict=True) if is_trained):
        for turn in (turn for turn in episode.turns if not turn.untrained):
            sampled = turn.tokens.num_sampled
            episode_tokens += 0 if turn.branch else sampled
            branch_tokens += sampled if turn.branch else 0
    num_tokens = episode_tokens + branch_tokens
    # the common denominator is the number of all trained tokens
    return num_tokens / max(1, episode_tokens), num_tokens / max(1, branch_tokens)
