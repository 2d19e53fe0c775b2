"""Credit of branches and of segments, against the papers' formulas written out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace import algo as formulas
from headrace.algo.base import BatchLayout
from headrace.algo.config import AlgoConfig
from headrace.base.types.batch import Batch
from headrace.base.types.episode import Branch, EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.control.credit import credit
from headrace.flow.layout import collate
from headrace.flow.pivots import list_outcomes


def turn(length: int, parent: int | None, *, branch: Branch | None = None, **fields: Any) -> Turn:
    tokens = Tokens(ids_T=[7] * length, logprobs_T=[-1.0] * length, versions_T=[0] * length)
    return Turn(
        author="policy", tokens=tokens, parent=parent, stop_reason=StopReason.STOP, branch=branch, **fields
    )  # fmt: skip


def episode(place: int, reward: float, *turns: Turn) -> EpisodeGraph:
    prompt = Turn(author="task", tokens=Tokens.observed([1, 2]))
    return EpisodeGraph(key=EpisodeKey(0, place), turns=[prompt, *turns], status=EpisodeStatus.SCORED, reward=reward)


def grown() -> ScoredGroup:
    """A right answer; a wrong one with two branches; a wrong one with branches at two pivots, one of two turns."""
    first = [turn(3, 0), turn(5, 1)]
    first += [turn(4, 1, branch=Branch(0, n, reward)) for n, reward in enumerate([1.0, 0.0])]
    second = [turn(2, 0), turn(2, 1), turn(2, 2)]
    second += [
        turn(3, 1, branch=Branch(0, 0, 0.0)),
        Turn(author="tool", tokens=Tokens.observed([9]), parent=4, branch=Branch(0, 0, 0.0)),
        turn(1, 5, branch=Branch(0, 0, 0.0)),
        turn(6, 1, branch=Branch(0, 1, 3.0)),
        turn(1, 2, branch=Branch(1, 0, 1.0)),
        turn(1, 2, branch=Branch(1, 1, 1.0)),
        turn(8, 2, branch=Branch(1, 2, None), untrained="branch_failed"),
    ]
    return ScoredGroup(
        number=0, episodes=(episode(0, 1.0, turn(4, 0)), episode(1, 0.0, *first), episode(2, 0.0, *second))
    )


def normalised(rewards: Sequence[float]) -> list[float]:
    values = np.array(rewards, np.float64)
    spread = values.std(ddof=1)
    return list((values - values.mean()) / (spread + 1e-6) if spread else values - values.mean())


def token_weights(batch: Batch, algo: AlgoConfig) -> np.ndarray:
    """∂loss/∂(−A log π) of every token that carries loss, times its advantage: what the gradient is made of."""
    lengths_S = torch.from_numpy(batch.lengths_S.astype(np.int64))
    samples_N = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    layout = BatchLayout(
        mask_N=torch.from_numpy(batch.mask_N.copy()),
        samples_N=samples_N,
        episodes_S=torch.from_numpy(batch.episodes_S.astype(np.int64)),
        groups_S=torch.from_numpy(batch.groups_S.astype(np.int64)),
    )
    shares = algo.reduction(layout)
    return (shares.weights_N.numpy() / float(shares.mass) * batch.advantages_N)[batch.mask_N].astype(np.float64)


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("reduction", ["token_mean", "constant", "sequence_mean_token_sum"])
def test_each_stream_has_its_own_advantages_and_is_reduced_by_itself(reduction: str, weight: float) -> None:
    algo = AlgoConfig(advantage="grpo", reduction=reduction)
    group = grown()
    batch = collate(0, [group], credit(algo, [group], branch_weight=weight))
    own, local = normalised([1.0, 0.0, 0.0]), [normalised([1.0, 0.0]), normalised([0.0, 3.0]), normalised([1.0, 1.0])]
    own_tokens = [own[0]] * 4 + [own[1]] * 8 + [own[2]] * 6
    branch_tokens = [local[0][0]] * 4 + [local[0][1]] * 4
    branch_tokens += [local[1][0]] * (3 + 1) + [local[1][1]] * 6 + [local[2][0]] + [local[2][1]]
    by_token = reduction == "token_mean"
    own_mass, branch_mass = (len(own_tokens), len(branch_tokens)) if by_token else (3, 6)
    expected = [a / own_mass for a in own_tokens] + [weight * a / branch_mass for a in branch_tokens]
    found = token_weights(batch, algo)
    assert len(found) == len(expected)  # what is shared, and what failed, once and not at all
    np.testing.assert_allclose(np.sort(found), np.sort(expected), atol=1e-6)


def test_an_episode_without_branches_is_credited_as_ever() -> None:
    group = grown()
    bare = ScoredGroup(number=0, episodes=(group.episodes[0], episode(1, 0.0, turn(4, 0))))
    assert credit(AlgoConfig(), [bare], branch_weight=0.5) == credit(AlgoConfig(), [bare])
    assert all(isinstance(one, float) for one in credit(AlgoConfig(), [bare]))


def test_shaping_sees_a_branch_with_the_answer_that_it_ends() -> None:
    overlong = {"kind": "overlong", "max_tokens": 8, "buffer": 4}
    group = grown()
    algo = AlgoConfig(advantage={"kind": "grpo", "std": "none"}, shaping=[overlong])
    credits = credit(algo, [group])[1]
    assert not isinstance(credits, float)
    # both branches of the second episode end answers of 3 + 4 tokens: −3/4 each, so only their rewards differ
    assert credits[3] == pytest.approx(-credits[4])
    assert credits[3] > 0


def test_the_outcome_of_a_pivot_is_its_depth_and_whether_a_branch_succeeded() -> None:
    _, first, second = grown().episodes
    assert list_outcomes(first, 0.0) == [(3 / 8, True)]
    assert list_outcomes(second, 1.0) == [(2 / 6, True), (4 / 6, False)]
    assert list_outcomes(grown().episodes[0], 0.0) == []


def segmented(place: int, reward: float, process: Sequence[tuple[int, float]]) -> EpisodeGraph:
    turns = [turn(length, number, process=graded) for number, (length, graded) in enumerate(process)]
    return episode(place, reward, *turns)


def test_segments_are_credited_by_the_formula_of_the_paper() -> None:
    process = [[(3, 0.2), (2, 0.9), (4, 0.4)], [(5, 0.7)], [(1, 0.0), (6, 1.0)]]
    rewards = [1.0, 0.0, 1.0]
    episodes = tuple(segmented(n, r, p) for n, (r, p) in enumerate(zip(rewards, process, strict=True)))
    config = AlgoConfig(advantage={"kind": "prpo", "weight": 0.5})
    credits = credit(config, [ScoredGroup(number=0, episodes=episodes)])
    per_token = [np.repeat([g for _, g in p], [n for n, _ in p]).astype(np.float64) for p in process]
    spread = np.concatenate(per_token).std() + 1e-6
    outcome = normalised(rewards)
    for place, values in enumerate(per_token):
        expected = outcome[place] + 0.5 * (values - values.mean()) / spread
        found = credits[place]
        assert not isinstance(found, float)
        counts = [0] + [n for n, _ in process[place]]
        np.testing.assert_allclose(np.repeat(found, counts), expected, atol=1e-9)
        assert np.repeat(found, counts).mean() == pytest.approx(outcome[place])
    whole = formulas.advantage(
        "prpo",
        rewards,
        process=[values.tolist() for values in per_token],
        segments=[np.repeat(range(len(p)), [n for n, _ in p]).tolist() for p in process],
        weight=0.5,
    )
    flat = [np.repeat(found, [0] + [n for n, _ in p]) for found, p in zip(credits, process, strict=True)]
    np.testing.assert_allclose(np.concatenate(flat), whole, atol=1e-9)


def test_a_turn_that_carries_no_loss_is_no_segment() -> None:
    kept = segmented(0, 1.0, [(3, 0.2), (2, 0.9)])
    left_out = msgspec.structs.replace(kept.turns[2], untrained="not_chosen", process=100.0)
    other = segmented(1, 0.0, [(3, 0.2)])
    group = ScoredGroup(number=0, episodes=(replace(kept, turns=[*kept.turns[:2], left_out]), other))
    found = credit(AlgoConfig(advantage="prpo"), [group])[0]
    assert not isinstance(found, float)
    assert found[1] == pytest.approx(normalised([1.0, 0.0])[0])
    assert found[2] == 0
