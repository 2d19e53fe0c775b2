"""Busy and idle time is the length of a union of intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.trace import Span
from headrace.run.observe.trace import complement, intersection, make_span_account, seconds, union

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


def test_overlapping_work_of_one_lane_counts_once() -> None:
    spans = [span("scoring", 0, 4), span("scoring", 1, 3), span("scoring", 3, 5), span("engine", 0, 100)]
    assert make_span_account(spans, (0, 10)).lanes_s["scoring"] == 5
    assert make_span_account(spans, (5, 10)).lanes_s["scoring"] == 0


def test_a_wait_is_not_work() -> None:
    spans = [span("learner", 0, 3, "wait batch"), span("learner", 3, 4, "train")]
    assert make_span_account(spans, (0, 4)).lanes_s["learner"] == 1


def test_an_empty_interval_has_no_work() -> None:
    assert make_span_account([span("engine", 0, 1)], (1, 1)).engine_idle == 0.0


def test_idle_time_is_given_to_the_part_that_works_meanwhile_and_all_of_it_once() -> None:
    spans = [
        span("engine", 0, 4),
        span("learner", 0, 8, "wait batch"),
        span("controller", 3, 5),
        span("environment", 4, 6),
        span("sync", 5, 7, "stage"),
        span("learner", 8, 12, "train"),
        span("learner", 12, 16, "wait rewards"),
        span("engine", 12, 13),
        span("scoring", 12, 15),
        span("controller", 12, 13),
        span("learner", 16, 17, "wait sync"),
    ]
    found = make_span_account(spans, (0, 20))
    assert found.learner_busy_s == pytest.approx(4)
    assert found.learner_waits_s == pytest.approx(
        {"engine": 4, "controller": 1 + 1, "environment": 1, "sync": 1 + 1, "scoring": 2, "nobody": 1 + 1 + 3}
    ), "an engine that works behind the last episode of a batch works on another one"
    assert found.engine_busy_s == pytest.approx(5)
    assert found.engine_waits_s == pytest.approx(
        {"controller": 1, "environment": 1, "sync": 1, "learner": 4, "scoring": 2, "nobody": 1 + 5}
    )
    assert found.lanes_s["controller"] == pytest.approx(3)


@given(
    st.lists(st.tuples(st.sampled_from(["engine", "learner", "controller", "scoring", "sync"]), intervals), max_size=8)
)
def test_work_and_waits_make_up_the_time(parts: list[tuple[str, list[tuple[int, int]]]]) -> None:
    names = {"learner": ("train", "wait batch", "wait rewards", "wait sync")}
    spans = [
        span(lane, start, end, names.get(lane, ("work",))[place % len(names.get(lane, ("work",)))])
        for lane, pieces in parts
        for place, (start, end) in enumerate(pieces)
    ]
    found = make_span_account(spans, (5, 30), {"engine"})
    for busy_s, waits_s in ((found.learner_busy_s, found.learner_waits_s), (found.engine_busy_s, found.engine_waits_s)):
        assert busy_s + sum(waits_s.values()) == pytest.approx(25)
        assert min(waits_s.values(), default=0.0) >= 0
    for lane, busy_s in (("engine", found.engine_busy_s), ("learner", found.learner_busy_s)):
        worked = ticks([(each.start_s, each.end_s) for each in spans if each.lane == lane and "wait" not in each.name])
        assert busy_s == pytest.approx(len(worked & set(range(5, 30))))


def test_a_learner_that_copies_its_weights_or_waits_for_a_buffer_stands_still_for_the_sync() -> None:
    spans = [
        span("learner", 0, 4, "train"),
        span("learner", 4, 5, "snapshot"),
        span("sync", 5, 7, "stage"),
        span("learner", 7, 9, "wait sync"),
    ]
    found = make_span_account(spans, (0, 10))
    assert found.learner_busy_s == 5
    assert found.learner_waits_s == {"sync": 2, "nobody": 3}
    assert found.exposed_sync_s == pytest.approx(1 + 2)


def test_a_stopped_process_does_not_work_and_what_waits_meanwhile_waits_for_it() -> None:
    spans = [
        span("engine", 0, 8),
        span("stopped", 2, 5, "engine"),
        span("stopped", 5, 6, "engine"),
        span("learner", 0, 3, "train"),
        span("learner", 3, 4, "wait batch"),
        span("learner", 4, 7, "wait sync"),
        span("learner", 7, 10, "train"),
        span("stopped", 8, 9, "learner-1"),
    ]
    found = make_span_account(spans, (0, 10))
    assert found.engine_busy_s == pytest.approx(8 - 4)
    assert found.engine_waits_s == pytest.approx({"stopped": 4 + 1, "learner": 1})
    assert found.learner_busy_s == pytest.approx(3 + 3 - 1), "a learner stands still with any of its ranks"
    assert found.learner_waits_s == pytest.approx({"stopped": 3 + 1, "sync": 1})
    assert found.exposed_sync_s == pytest.approx(1)
    two = make_span_account([*spans, span("engine-1", 0, 8)], (0, 10))
    assert two.learner_waits_s["sync"] == pytest.approx(3), "with an engine that goes on, one that is stopped is not it"
    other = make_span_account(
        [*spans[:1], span("learner", 0, 8, "wait batch"), span("stopped", 0, 8, "fork server")], (0, 10)
    )
    assert "stopped" not in other.learner_waits_s
    alone = make_span_account([span("learner", 0, 8, "wait batch"), span("stopped", 0, 8, "controller")], (0, 10))
    assert alone.learner_waits_s["stopped"] == pytest.approx(8)


def test_of_several_engines_the_mean_counts_and_the_learner_waits_while_any_of_them_works() -> None:
    spans = [span("engine-1", 0, 4), span("engine-2", 0, 2), span("engine-1", 4, 5, "prefill"), span("scoring", 3, 8)]
    spans.append(span("learner", 0, 7, "wait batch"))
    found = make_span_account([*spans, span("learner", 7, 10), span("agent-judge", 0, 10)], (0, 10))
    assert found.engine_busy_s == pytest.approx(3.5)
    assert found.prefill_s == pytest.approx(0.5)
    assert found.learner_waits_s == {"engine": 5, "scoring": 2}
    assert found.engine_waits_s == pytest.approx({"scoring": (2 + 4) / 2, "learner": 3, "nobody": 0.5})
    assert make_span_account(spans, (0, 10), {"engine-3"}).engine_busy_s == pytest.approx(7 / 3)
