"""The index of spans against the trace's own arithmetic."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.trace import Span
from headrace.run.observe.trace import intersection, seconds, union
from headrace.wings.view.lanes import LaneIndex, fill_fractions, merge_intervals

EDGES_B = np.linspace(0.0, 15.0, 11)
MOMENTS = st.integers(0, 60).map(lambda each: each / 4)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda pair: (min(pair), max(pair))), max_size=30)


@given(intervals=INTERVALS)
def test_merged_intervals_fill_bins_as_their_union_does(intervals: list[tuple[float, float]]) -> None:
    ordered = sorted(intervals)
    columns = (np.array([start for start, _ in ordered]), np.array([end for _, end in ordered]))
    edges_B = np.linspace(0.0, 15.0, 31)
    bins = list(pairwise(edges_B.tolist()))
    shares = [seconds(intersection(union(intervals), [each])) / (each[1] - each[0]) for each in bins]
    np.testing.assert_allclose(fill_fractions(merge_intervals(*columns), edges_B), shares, atol=1e-12)


@given(intervals=INTERVALS)
def test_spans_in_any_order_and_in_any_pieces_make_the_same_index(intervals: list[tuple[float, float]]) -> None:
    spans = [Span(lane="engine", name="generate", start_s=start, end_s=end, step=1) for start, end in intervals]
    once, often = LaneIndex(), LaneIndex()
    once.add(spans)
    for span in reversed(spans):
        often.add([span])
        often.window(EDGES_B)
    one, other = once.window(EDGES_B), often.window(EDGES_B)
    assert once.busy("engine", (0.0, 15.0)) == pytest.approx(often.busy("engine", (0.0, 15.0)))
    assert [sorted(zip(*part["spans"], strict=True)) for lane in one for part in lane["parts"]] == [
        sorted(zip(*part["spans"], strict=True)) for lane in other for part in lane["parts"]
    ]


def test_waits_are_not_work_and_spans_that_end_before_they_begin_are_left_out() -> None:
    index = LaneIndex()
    index.add([
        Span(lane="learner", name="wait batch", start_s=0.0, end_s=3.0),
        Span(lane="learner", name="train", start_s=3.0, end_s=4.0),
        Span(lane="learner", name="train", start_s=9.0, end_s=8.0),
    ])  # fmt: skip
    assert index.busy("learner", (0.0, 4.0)) == 0.25
    assert index.extent() == (0.0, 4.0)
    assert index.num_spans == 2


def test_lanes_come_in_the_usual_order_with_strangers_last() -> None:
    index = LaneIndex()
    index.add(Span(lane=lane, name="work", start_s=0, end_s=1) for lane in ("zebra", "sync", "engine", "learner"))
    assert index.lanes() == ["engine", "learner", "sync", "zebra"]


def test_a_clock_that_went_back_is_moved_behind_and_a_late_span_is_not() -> None:
    index = LaneIndex(resets=1)
    moments = [(900.0, 910.0), (895.0, 896.0), (5.0, 8.0), (8.0, 9.0)]
    index.add(Span(lane="engine", name="generate", start_s=start, end_s=end) for start, end in moments)
    assert index.moved_s == [0.0, 905.0]
    assert index.extent() == (895.0, 914.0)
    never = LaneIndex()
    never.add(Span(lane="engine", name="generate", start_s=start, end_s=end) for start, end in moments)
    assert never.extent() == (5.0, 910.0)
