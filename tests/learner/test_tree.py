"""Samples become prefix trees, and trees are cut where that costs least: packing alone, without a model."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from headrace.base.types.batch import Batch
from headrace.base.types.recorded import Routing
from headrace.learner import tree
from headrace.learner.packing import Cost, MicroBatch, Packing, Unit, plan
from headrace.learner.tree import PrefixTrees, cut_tree
from tests.learner.trees import Ids, forest, make_batch, naive_rows, routed_alike


def lengths_of(batch: Batch) -> np.ndarray:
    return batch.lengths_S.astype(np.int64)


def rows_of(batch: Batch, budget: int = 10**9) -> int:
    units = cut_tree(
        PrefixTrees(batch).make_unit(np.arange(len(batch.lengths_S))), lengths_of(batch), Packing(budget=budget)
    )
    micros = plan(batch.lengths_S, units, Packing(budget=budget))[0]
    rows = sum(len(micro.places_R) for micro in micros)
    assert rows == sum(unit.num_rows(lengths_of(batch)) for unit in units)
    return rows


def groups_of_seven(count: int, *, alike: bool) -> Batch:
    """Answers of 128 tokens to prompts of 256; the fourth sample of each group has a prompt of its own, or, with
    ``alike``, all fourth samples have the same."""
    numbers = itertools.count()

    def draw(length: int) -> Ids:
        return [next(numbers) for _ in range(length)]

    samples = []
    common = draw(256)
    for _ in range(count):
        prompt, other = draw(256), common if alike else draw(256)
        samples += [((other if member == 3 else prompt) + draw(128), 256) for member in range(7)]
    return make_batch(samples, np.repeat(np.arange(count), 7).tolist())


@pytest.mark.parametrize(("count", "alike", "apart", "rows"), [(2, False, 5376, 2816), (3, True, 8064, 3712)])
def test_a_sample_that_begins_otherwise_takes_nothing_from_the_others(count, alike, apart, rows):
    batch = groups_of_seven(count, alike=alike)
    assert batch.num_tokens == apart
    assert rows_of(batch) == naive_rows(batch, range(7 * count)) == rows


def random_tree(seed: int) -> Batch:
    """Samples that continue beginnings of earlier ones, from anywhere, over an alphabet of two to five ids."""
    rng = np.random.default_rng(seed)
    alphabet, count = int(rng.integers(2, 6)), int(rng.integers(1, 12))
    samples: list[Ids] = []
    for _ in range(count):
        begin = samples[rng.integers(len(samples))] if samples and rng.random() < 0.8 else []
        kept = int(rng.integers(len(begin) + 1))
        samples.append(begin[:kept] + rng.integers(0, alphabet, rng.integers(0 if kept else 1, 9)).tolist())
    batch = make_batch([(ids, 1) for ids in samples], rng.integers(0, 3, count).tolist())
    return routed_alike(batch, 2, 3, seed) if seed % 2 else batch


@pytest.mark.parametrize("block", range(4))
def test_rows_are_the_nodes_of_random_trees(block):
    for seed in range(250 * block, 250 * block + 250):
        batch = random_tree(seed)
        assert rows_of(batch) == naive_rows(batch, range(len(batch.lengths_S))), seed


def test_rows_are_the_nodes_even_if_all_keys_of_experts_agree(monkeypatch):
    """Keys only sort: what is shared is what is the same, or less."""
    monkeypatch.setattr(tree, "_MIX", np.uint64(0))
    for seed in range(1, 60, 2):
        batch = random_tree(seed)
        assert rows_of(batch) >= naive_rows(batch, range(len(batch.lengths_S)))
        assert_rows_are_computations(batch, MicroBatch.from_units(units_of(batch), lengths_of(batch)))


def units_of(batch: Batch, budget: int = 10**9, ranks: int = 1, best: int | None = None) -> list[Unit]:
    packing = Packing(budget=budget, num_ranks=ranks, cost=Cost(best_rows=best))
    return cut_tree(PrefixTrees(batch).make_unit(np.arange(len(batch.lengths_S))), lengths_of(batch), packing)


def assert_rows_are_computations(batch: Batch, micro: MicroBatch) -> None:
    """Two tokens have the same row only if all they are computed from is the same."""
    rows_M = np.arange(len(micro.places_M)) if micro.rows_M is None else micro.rows_M
    routing = batch.routing
    index_N = None if routing is None else np.cumsum(routing.known_T) - 1
    meaning: dict[int, object] = {}
    for first, length in zip(np.cumsum(micro.lengths_K) - micro.lengths_K, micro.lengths_K, strict=True):
        before = -1
        for row, place in zip(rows_M[first:][:length], micro.places_M[first:][:length], strict=True):
            experts: object = None
            if routing is not None and index_N is not None and routing.known_T[place]:
                experts = routing.experts_RLK[index_N[place]].tolist()
            computed = (before, int(batch.ids_N[place]), experts)
            assert meaning.setdefault(int(row), computed) == computed
            before = int(row)


@pytest.mark.parametrize("seed", range(8))
def test_a_row_stands_for_tokens_with_the_same_ids_experts_and_past(seed):
    for batch in (random_tree(seed), routed_alike(forest(seed), 2, 3, seed)):
        for budget in (27, 60, 10_000):
            for unit in units_of(batch, budget):
                assert unit.num_rows(lengths_of(batch)) <= budget
            for micro in plan(batch.lengths_S, units_of(batch, budget), Packing(budget=budget))[0]:
                assert_rows_are_computations(batch, micro)
                assert len(micro.places_R) <= budget


def test_a_row_is_not_shared_where_one_record_is_missing_or_another_expert_stands():
    ids = [5, 6, 7, 8]
    batch = make_batch([(ids, 1), (ids, 1), (ids, 1)], [0, 0, 0])
    experts = np.zeros((12, 1, 2), np.uint8) + np.arange(2, dtype=np.uint8)
    experts[4 + 2] = [1, 0]
    known = np.ones(12, bool)
    known[8 + 3] = False
    routing = Routing(known_T=known, experts_RLK=experts[known])
    unit = PrefixTrees(msgspec.structs.replace(batch, routing=routing)).make_unit(np.arange(3))
    assert sorted(unit.shared_K.tolist()) == [0, 2, 3]
    assert rows_of(batch) == 4


def best_cut(lengths: np.ndarray, shared: np.ndarray, budget: int) -> int:
    """The fewest rows of any division into runs of at most ``budget`` rows: all are tried."""
    fewest = 10**9
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        begins = np.flatnonzero([True, *cuts])
        rows = [
            int((lengths[a:b] - shared[a:b]).sum() + shared[a])
            for a, b in zip(begins, [*begins[1:], len(lengths)], strict=True)
        ]
        if all(each <= budget for each in rows):
            fewest = min(fewest, sum(rows))
    return fewest


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_beyond_the_budget_is_cut_where_the_fewest_tokens_are_computed_again(seed):
    batch = random_tree(2 * seed)
    lengths = lengths_of(batch)
    whole = PrefixTrees(batch).make_unit(np.arange(len(lengths)))
    budget = int(lengths.max()) + seed % 7
    units = cut_tree(whole, lengths, Packing(budget=budget))
    assert np.concatenate([unit.samples for unit in units]).tolist() == whole.samples.tolist()
    assert sum(unit.num_rows(lengths) for unit in units) == best_cut(lengths[whole.samples], whole.shared_K, budget)


def test_trees_are_cut_for_cache_and_ranks_where_little_is_computed_again():
    batch = make_batch([([1, *range(2 + 10 * n, 11 + 10 * n)], 1) for n in range(8)], [0] * 8)  # one token in common
    lengths = lengths_of(batch)
    assert [len(unit.samples) for unit in units_of(batch)] == [8]
    assert max(unit.num_rows(lengths) for unit in units_of(batch, best=30)) <= 36
    long = make_batch([([*range(100), *range(100 + 10 * n, 110 + 10 * n)], 1) for n in range(8)], [0] * 8)
    assert [len(unit.samples) for unit in units_of(long, best=30)] == [8]
    assert [unit.num_rows(lengths_of(long)) for unit in units_of(long, best=30, ranks=2)] == [150, 130]
    assert [len(unit.samples) for unit in units_of(long, best=30, ranks=8)] == [1] * 8
    assert len(units_of(batch, ranks=4)) >= 4
    ranks = plan(batch.lengths_S, units_of(batch, ranks=4), Packing(budget=10**9, num_ranks=4))
    assert [len(rank[0].samples_K) for rank in ranks] == [2, 2, 2, 2]


def test_samples_that_share_nothing_are_units_of_their_own():
    batch = make_batch([([n, *range(10)], 1) for n in range(20, 25)], [0] * 5)
    units = units_of(batch)
    assert [len(unit.samples) for unit in units] == [1] * 5
    assert MicroBatch.from_units(units, lengths_of(batch)).rows_M is None


def test_the_same_batch_makes_the_same_tree():
    batch = routed_alike(forest(3), 2, 4)
    one, other = (PrefixTrees(batch).make_unit(chosen) for chosen in (np.arange(15), np.arange(15)[::-1]))
    assert one.samples.tolist() == other.samples.tolist()
    assert one.shared_K.tolist() == other.shared_K.tolist()
