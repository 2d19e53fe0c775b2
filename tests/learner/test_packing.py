"""Batches are cut into whole samples, within the budget, balanced, and always the same way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import RunError
from headrace.learner.packing import microbatches, pack, ragged_arange

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


def test_positions_and_local_samples_count_from_zero():
    (micro,) = microbatches(np.array([2, 5, 3], np.int32), np.array([0, 2]), BUDGET)
    assert micro.positions_M().tolist() == [0, 1, 0, 1, 2]
    assert micro.local_samples_M().tolist() == [0, 0, 1, 1, 1]
    assert micro.places_M.tolist() == [0, 1, 7, 8, 9]


def test_ragged_arange_of_nothing_is_empty():
    assert ragged_arange(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
