"""The controller's event loop tells how much of the time it works."""

import asyncio

import pytest

from headrace.base.clock import RealClock
from headrace.base.types.trace import Span
from headrace.run.observe import WatchedLoop
from headrace.run.observe.looptime import MAX_SPAN_S, MIN_SPAN_S, LoopTime


class Hand:
    """A clock that is moved on by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


def lived(rounds: list[tuple[float, float]]) -> list[Span]:
    """The spans of a loop that works and waits by turns, for so many seconds each."""
    clock = Hand()
    work = LoopTime(clock)
    for works_s, waits_s in rounds:
        clock.now_s += works_s
        since_s = work.begin_wait()
        clock.now_s += waits_s
        work.end_wait(since_s)
    return work.take_spans()


def test_work_between_two_long_waits_is_one_span_where_it_was() -> None:
    spans = lived([(0.04, 0.1), (0.06, 0.1)])
    assert [(span.start_s, span.end_s) for span in spans] == [
        pytest.approx((100.0, 100.04)),
        pytest.approx((100.14, 100.2)),
    ]
    assert {(span.lane, span.name) for span in spans} == {("controller", "run")}


@pytest.mark.parametrize(("works_s", "waits_s"), [(0.0002, 0.0008), (0.003, 0.001), (0.002, 0.02), (0.0001, 0.0001)])
def test_however_often_it_is_woken_all_work_is_told_in_few_spans(works_s: float, waits_s: float) -> None:
    rounds = 5000
    spans = lived([(works_s, waits_s)] * rounds)
    assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(rounds * works_s)
    assert len(spans) <= rounds * (works_s + waits_s) / MIN_SPAN_S + 2
    ends = [span.end_s for span in spans]
    assert all(span.start_s >= end for span, end in zip(spans[1:], ends, strict=False)), "none overlaps another"


def test_a_loop_that_never_waits_tells_of_it_while_it_goes_on() -> None:
    clock = Hand()
    work = LoopTime(clock)
    clock.now_s += 3 * MAX_SPAN_S
    assert sum(span.end_s - span.start_s for span in work.take_spans()) == pytest.approx(3 * MAX_SPAN_S)
    clock.now_s += 0.01
    assert [span.end_s - span.start_s for span in work.take_spans()] == [pytest.approx(0.01)]


def test_a_real_loop_knows_its_work_from_its_waits() -> None:
    clock = RealClock()

    async def main() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, WatchedLoop)
        loop.work.take_spans()
        begun_s = clock.now()
        woken = asyncio.Event()
        loop.call_later(0.2, woken.set)
        await woken.wait()
        waited = sum(span.end_s - span.start_s for span in loop.work.take_spans())
        worked_until_s = clock.now() + 0.1
        while clock.now() < worked_until_s:
            pass
        worked = sum(span.end_s - span.start_s for span in loop.work.take_spans())
        return waited, worked, clock.now() - begun_s

    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        waited, worked, whole = runner.run(main())
    assert worked >= 0.1
    assert waited + worked <= whole - 0.19, "what it waited is no work"
