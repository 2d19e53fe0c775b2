"""Batches are cut into whole samples, within the budget, balanced, and always the same way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import RunError
from headrace.learner.cost import estimate_cost
from headrace.learner.packing import Cost, MicroBatch, Packing, microbatches, pack, plan, ragged_arange, singly
from headrace.models import ModelConfig, load_model
from headrace.models.routing import find_routing
from tests.learner.builders import tiny

BUDGET = 64
lengths_lists = st.lists(st.integers(1, BUDGET), min_size=1, max_size=60)


@given(lengths_lists)
def test_every_token_is_in_exactly_one_microbatch_and_samples_stay_whole(lengths):
    lengths_S = np.array(lengths, np.int32)
    cut = microbatches(lengths_S, np.arange(len(lengths)), BUDGET)
    places = np.concatenate([micro.places_M for micro in cut])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    starts = np.cumsum(lengths_S) - lengths_S
    for micro in cut:
        expected = [starts[s] + t for s in micro.samples_K for t in range(lengths_S[s])]
        assert micro.places_M.tolist() == expected
        assert len(micro.places_M) <= BUDGET


@given(lengths_lists)
def test_no_more_microbatches_than_first_fit_decreasing(lengths):
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((i for i, free in enumerate(room) if free >= length), None)
        if place is None:
            room.append(BUDGET - length)
        else:
            room[place] -= length
    assert len(pack(np.array(lengths), BUDGET)) == len(room)


@given(lengths_lists, st.data())
def test_only_chosen_samples_are_in_the_cut(lengths, data):
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))), np.int64)
    cut = microbatches(np.array(lengths, np.int32), chosen, BUDGET)
    assert sorted(s for micro in cut for s in micro.samples_K.tolist()) == chosen.tolist()


@given(lengths_lists)
def test_the_same_lengths_are_cut_the_same_way(lengths):
    lengths_S, samples = np.array(lengths, np.int32), np.arange(len(lengths))
    first, second = microbatches(lengths_S, samples, BUDGET), microbatches(lengths_S, samples, BUDGET)
    assert [m.samples_K.tolist() for m in first] == [m.samples_K.tolist() for m in second]


def test_equal_samples_are_spread_evenly():
    assert sorted(len(members) for members in pack(np.full(9, 10), 40)) == [3, 3, 3]


def test_where_the_even_spread_does_not_fit_first_fit_stands():
    lengths = np.array([6, 4, 4, 3, 3])  # 6+4 and 4+3+3 fit in 10; emptiest-first gives 6+3+3 = 12
    assert [lengths[members].tolist() for members in pack(lengths, 10)] == [[6, 4], [4, 3, 3]]


def test_a_sample_over_the_budget_is_refused_with_its_length_and_the_lever():
    with pytest.raises(RunError, match=r"sample 1 .* 65 tokens.*learner.tokens_per_microbatch=64") as caught:
        microbatches(np.array([3, 65], np.int32), np.arange(2), BUDGET)
    assert "tokens_per_microbatch >= 65" in caught.value.remedy


def test_local_samples_count_from_zero():
    (micro,) = microbatches(np.array([2, 5, 3], np.int32), np.array([0, 2]), BUDGET)
    assert micro.local_samples_M().tolist() == [0, 0, 1, 1, 1]
    assert micro.places_M.tolist() == [0, 1, 7, 8, 9]


def test_ragged_arange_of_nothing_is_empty():
    assert ragged_arange(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


COST = Cost(per_pair=0.05)


@given(lengths_lists, st.integers(1, 5))
def test_every_rank_gets_as_many_microbatches_and_every_sample_is_in_one(lengths, num_ranks):
    packing = Packing(budget=BUDGET, num_ranks=num_ranks, cost=COST)
    ranks = plan(np.array(lengths, np.int32), singly(np.arange(len(lengths))), packing)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(s for rank in ranks for micro in rank for s in micro.samples_K.tolist()) == list(range(len(lengths)))
    assert all(len(micro.places_M) <= BUDGET for rank in ranks for micro in rank)
    fewest = len(pack(np.array(lengths), BUDGET))
    assert len(ranks[0]) == -(-fewest // num_ranks)


@given(lengths_lists, st.integers(1, 5))
def test_a_plan_is_a_function_of_its_input(lengths, num_ranks):
    packing = Packing(budget=BUDGET, num_ranks=num_ranks, cost=COST)
    one, other = (plan(np.array(lengths, np.int32), singly(np.arange(len(lengths))), packing) for _ in range(2))
    assert [[m.samples_K.tolist() for m in rank] for rank in one] == [[m.samples_K.tolist() for m in r] for r in other]


def costs_of(ranks: list[list[MicroBatch]], cost: Cost) -> np.ndarray:
    """(ranks, turns)"""
    return np.array(
        [[cost.per_token * m.lengths_K.sum() + cost.per_pair * (m.lengths_K**2).sum() for m in rank] for rank in ranks]
    )


def test_long_answers_are_balanced_by_what_attention_costs():
    """Lognormal lengths, cv 1, on four ranks: what the ranks wait for each other is under a tenth, and less than with
    tokens alone in view."""
    rng = np.random.default_rng(0)
    sigma = np.sqrt(np.log(2))
    lengths = np.clip(rng.lognormal(np.log(1000) - sigma**2 / 2, sigma, 256), 8, 8192).astype(np.int32)
    real = Cost(per_pair=1 / 2000)

    def waiting(seen: Cost) -> float:
        costs = costs_of(plan(lengths, singly(np.arange(256)), Packing(budget=16384, num_ranks=4, cost=seen)), real)
        return float(costs.max(0).sum() / costs.mean(0).sum() - 1)

    assert waiting(real) < 0.1
    assert waiting(real) < waiting(Cost())


def test_a_microbatch_of_nothing_has_the_columns_of_nothing():
    micro = MicroBatch.from_units([], np.array([3, 4]))
    assert [len(micro.samples_K), len(micro.places_M), len(micro.places_R)] == [0, 0, 0]


@given(lengths_lists)
def test_passes_are_as_small_as_is_best_and_never_over_the_budget(lengths):
    def cut(best):
        packing = Packing(budget=BUDGET, cost=Cost(best_rows=best))
        return plan(np.array(lengths, np.int32), singly(np.arange(len(lengths))), packing)[0]

    fewest = len(cut(None))
    for best in (1, 20, BUDGET):
        micros = cut(best)
        wanted = -(-sum(lengths) // max(best, *lengths, 1)) if lengths else 0
        assert len(micros) in {fewest, max(fewest, wanted)}
        assert all(0 < len(micro.places_M) <= BUDGET for micro in micros)
        assert sorted(s for micro in micros for s in micro.samples_K.tolist()) == list(range(len(lengths)))


def test_even_samples_fill_passes_of_the_best_size():
    packing = Packing(budget=64, cost=Cost(best_rows=16))
    (micros,) = plan(np.full(12, 8, np.int32), singly(np.arange(12)), packing)
    assert [len(micro.places_M) for micro in micros] == [16] * 6


def test_dense_models_on_a_processor_are_computed_in_passes_that_its_cache_holds(tmp_path):
    dense = load_model(ModelConfig(path=str(tiny(tmp_path / "dense", intermediate_size=2**13))))
    assert estimate_cost(dense, None).best_rows == 2**8
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    mixture = load_model(ModelConfig(path=str(tiny(tmp_path / "moe", kind="qwen3_moe", extra=settings))))
    assert estimate_cost(mixture, find_routing(mixture)).best_rows is None


def test_attention_weighs_against_the_parameters_a_token_meets(tmp_path):
    dense = load_model(ModelConfig(path=str(tiny(tmp_path / "dense"))))
    embedding = dense.get_input_embeddings().weight.numel()
    parameters = dense.num_parameters() - (0 if dense.config.tie_word_embeddings else embedding)
    assert estimate_cost(dense, None).per_pair == pytest.approx(2 * 32 / parameters)
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    mixture = load_model(ModelConfig(path=str(tiny(tmp_path / "moe", kind="qwen3_moe", extra=settings))))
    idle = 2 * sum(p.numel() for name, p in mixture.named_parameters() if ".experts." in name) // 4
    parameters = mixture.num_parameters() - idle - (0 if mixture.config.tie_word_embeddings else embedding)
    assert estimate_cost(mixture, find_routing(mixture)).per_pair == pytest.approx(2 * 32 / parameters)
