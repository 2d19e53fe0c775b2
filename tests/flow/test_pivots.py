"""Pivots: where they may be, what is preferred, and what is learned from what became of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.config import validate
from headrace.base.errors import ConfigError
from headrace.flow import FlowConfig
from headrace.flow.pivots import PivotChooser, PivotConfig, Recoverability


@given(
    lengths=st.lists(st.integers(0, 60), max_size=4),
    gap=st.integers(1, 20),
    per_episode=st.integers(1, 5),
    choose=st.sampled_from(["utility", "uniform", "entropy"]),
    seed=st.integers(0, 99),
)
def test_pivots_keep_their_distance_and_leave_something_to_sample(
    lengths: list[int], gap: int, per_episode: int, choose: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    entropies = [rng.random(length) for length in lengths]
    chooser = PivotChooser(PivotConfig(gap=gap, per_episode=per_episode, choose=choose))
    pivots = chooser.choose(entropies, rng)
    room = any(length > gap for length in lengths)
    assert bool(pivots) == room
    assert len(pivots) <= per_episode
    starts = np.cumsum([0, *lengths])
    for pivot in pivots:
        assert gap <= pivot.num_tokens_before < lengths[pivot.answer]
        assert pivot.depth == (starts[pivot.answer] + pivot.num_tokens_before) / starts[-1]
    for first, second in itertools.pairwise(pivots):
        assert first < second
        assert first.answer != second.answer or second.num_tokens_before - first.num_tokens_before >= gap


def test_entropy_chooses_the_places_before_the_most_uncertain_tokens() -> None:
    entropies_T = np.zeros(40)
    entropies_T[[2, 20, 21, 30]] = [9.0, 3.0, 2.9, 1.0]  # 2 is too near to the beginning, 21 to 20
    chooser = PivotChooser(PivotConfig(gap=5, per_episode=2, choose="entropy"))
    pivots = chooser.choose([entropies_T], np.random.default_rng(0))
    assert [pivot.num_tokens_before for pivot in pivots] == [20, 30]


def test_uniform_reaches_every_candidate_equally_often() -> None:
    chooser, rng = PivotChooser(PivotConfig(gap=10, choose="uniform")), np.random.default_rng(1)
    chosen = [chooser.choose([np.zeros(45)], rng)[0].num_tokens_before for _ in range(4000)]
    counts = {at: chosen.count(at) / 4000 for at in sorted(set(chosen))}
    assert counts == {at: pytest.approx(0.25, abs=0.03) for at in (10, 20, 30, 40)}


def test_utility_is_recoverability_times_depth_to_the_power_of_its_bias() -> None:
    config = PivotConfig(gap=10, depth_bias=2.0)
    chooser, rng = PivotChooser(config), np.random.default_rng(2)
    learned = Recoverability()
    for number in range(60):
        depth, success = number / 60, number % 3 != 0 and number < 40
        chooser.learn(depth, success)
        learned.learn(depth, success)
    depths = np.array([10, 20, 30, 40]) / 45
    utility = learned(depths) * depths**2
    chosen = [chooser.choose([np.zeros(45)], rng)[0].num_tokens_before for _ in range(4000)]
    found = [chosen.count(at) / 4000 for at in (10, 20, 30, 40)]
    assert found == pytest.approx(utility / utility.sum(), abs=0.03)


def test_recoverability_is_where_the_penalised_likelihood_is_greatest() -> None:
    rng = np.random.default_rng(3)
    depths = rng.random(200)
    successes = rng.random(200) < 1 / (1 + np.exp(-(1.0 - 3.0 * depths)))
    learned = Recoverability()
    for depth, success in zip(depths.tolist(), successes.tolist(), strict=True):
        learned.learn(depth, success)
    zero, one = learned(np.array([0.0, 1.0]))
    intercept = np.log(zero / (1 - zero))
    slope = np.log(one / (1 - one)) - intercept

    def loss(a: float, b: float) -> float:
        logits = a + b * depths
        return float(np.logaddexp(0, np.where(successes, -logits, logits)).sum() + b * b / 2)

    best = loss(intercept, slope)
    for da, db in [(1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)]:
        assert loss(intercept + da, slope + db) > best
    assert slope < -1


@pytest.mark.parametrize("successes", [[True] * 30, [False] * 30, [True, False] * 5])
def test_nothing_is_preferred_while_too_little_is_known(successes: list[bool]) -> None:
    learned = Recoverability()
    for number, success in enumerate(successes):
        learned.learn(number / 30, success)
    assert learned(np.array([0.1, 0.9])).tolist() == [1.0, 1.0]


def test_a_bias_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth_bias=1 has no effect with choose='uniform'"):
        validate(FlowConfig, {"pivots": {"choose": "uniform", "depth_bias": 1.0}})
