"""Busy and idle time is the length of a union of intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe import account, busy_frac, idle_frac
from headrace.observe.trace import complement, coverage, intersection, seconds, union
from headrace.types.trace import Span

moments = st.integers(0, 40)
intervals = st.lists(st.tuples(moments, moments).map(lambda pair: (min(pair), max(pair))), max_size=12)


def ticks(spans: list[tuple[float, float]]) -> set[int]:
    """The unit intervals that the spans cover: slow and obviously right."""
    return {tick for start, end in spans for tick in range(int(start), int(end))}


def span(lane: str, start_s: float, end_s: float, name: str = "work") -> Span:
    return Span(lane=lane, name=name, start_s=start_s, end_s=end_s)


@given(intervals, intervals)
def test_interval_algebra_agrees_with_counting_ticks(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = union(left), union(right)
    assert ticks(a) == ticks(left)
    assert seconds(a) == len(ticks(left))
    assert ticks(intersection(a, b)) == ticks(left) & ticks(right)
    assert ticks(complement(a, (5, 30))) == set(range(5, 30)) - ticks(left)


@given(intervals)
def test_coverage_of_bins_adds_up_to_the_covered_time(pieces: list[tuple[int, int]]) -> None:
    edges_B = np.linspace(0, 40, 17)
    covered_B = coverage(union(pieces), edges_B)
    assert (covered_B * np.diff(edges_B)).sum() == pytest.approx(len(ticks(pieces)))
    assert covered_B.min() >= -1e-9
    assert covered_B.max() <= 1 + 1e-9


def test_overlapping_work_of_one_lane_counts_once() -> None:
    spans = [span("scoring", 0, 4), span("scoring", 1, 3), span("scoring", 3, 5), span("engine", 0, 100)]
    assert busy_frac(spans, "scoring", (0, 10)) == 0.5
    assert idle_frac(spans, "scoring", (5, 10)) == 1.0


def test_a_wait_is_not_work() -> None:
    spans = [span("learner", 0, 3, "wait batch"), span("learner", 3, 4, "train")]
    assert busy_frac(spans, "learner", (0, 4)) == 0.25


def test_an_empty_interval_has_no_work() -> None:
    assert busy_frac([span("engine", 0, 1)], "engine", (1, 1)) == 0.0
    assert account([span("engine", 0, 1)], (1, 1)).engine_idle == 0.0


def test_scoring_counts_only_while_engine_and_learner_stand_idle() -> None:
    spans = [span("engine", 0, 4), span("scoring", 2, 8), span("learner", 8, 10, "train")]
    found = account(spans, (0, 10))
    assert found.engine_idle == pytest.approx(0.6)
    assert found.learner_idle == pytest.approx(0.8)
    assert found.scoring == pytest.approx(0.4)
    assert found.sync == 0.0


def test_the_time_in_which_both_work_is_measured() -> None:
    spans = [span("engine-1", 0, 4), span("engine-2", 1, 2), span("learner", 3, 6, "train")]
    assert account(spans, (0, 10)).together_s == pytest.approx(0.5)  # the mean of both engines


def test_sync_counts_while_the_learner_copies_and_while_both_wait_for_weights() -> None:
    spans = [
        span("learner", 0, 4, "train"),
        span("learner", 4, 5, "snapshot"),
        span("sync", 5, 7, "stage"),
        span("engine", 6, 10),
        span("sync", 8, 8.5, "commit"),
        span("learner", 7, 9, "wait sync"),
    ]
    found = account(spans, (0, 10))
    assert found.sync == pytest.approx(0.1 + 0.1 + 0.2)
    assert found.exposed_sync_s == pytest.approx(1 + 2)


def test_of_several_engines_the_mean_counts_and_all_must_stand_idle_for_rewards_to_hold_them_up() -> None:
    spans = [span("engine-1", 0, 4), span("engine-2", 0, 2), span("engine-1", 4, 5, "prefill"), span("scoring", 3, 8)]
    found = account([*spans, span("learner", 7, 10), span("agent-judge", 0, 10)], (0, 10))
    assert found.engine_busy_s == pytest.approx(3.5)
    assert found.prefill_s == pytest.approx(0.5)
    assert found.scoring_s == pytest.approx(2)
    assert account(spans, (0, 10), {"engine-3"}).engine_busy_s == pytest.approx(7 / 3)
