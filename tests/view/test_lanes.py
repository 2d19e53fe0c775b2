"""The index of spans against the trace's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.trace import Span
from headrace.run.observe.trace import coverage, union
from headrace.wings.view.lanes import LaneIndex, filled, merged

MOMENTS = st.integers(0, 60).map(lambda each: each / 4)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(lambda pair: (min(pair), max(pair))), max_size=30)


@given(intervals=INTERVALS)
def test_merged_intervals_fill_bins_as_their_union_does(intervals: list[tuple[float, float]]) -> None:
    ordered = sorted(intervals)
    columns = (np.array([start for start, _ in ordered]), np.array([end for _, end in ordered]))
    edges_B = np.linspace(0.0, 15.0, 31)
    np.testing.assert_allclose(filled(merged(*columns), edges_B), coverage(union(intervals), edges_B), atol=1e-12)


@given(intervals=INTERVALS)
def test_spans_in_any_order_and_in_any_pieces_make_the_same_index(intervals: list[tuple[float, float]]) -> None:
    spans = [Span(lane="engine", name="generate", start_s=start, end_s=end, step=1) for start, end in intervals]
    once, often = LaneIndex(), LaneIndex()
    once.add(spans)
    for span in reversed(spans):
        often.add([span])
        often.window((0.0, 15.0), 10)
    one, other = once.window((0.0, 15.0), 10), often.window((0.0, 15.0), 10)
    assert [lane["busy"] for lane in one] == pytest.approx([lane["busy"] for lane in other])
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
