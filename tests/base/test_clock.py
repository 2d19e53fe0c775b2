"""Virtual time: it moves only when nothing else can, and shows what would hang."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.clock import (
    RealClock,
    TimeLimit,
    VirtualClock,
    VirtualDeadlock,
    VirtualLoop,
    off_loop,
    run_virtual,
)


def test_virtual_day_passes_at_once_and_is_measured_exactly() -> None:
    async def main() -> tuple[float, float, float]:
        clock = VirtualClock()
        start = clock.now()
        await asyncio.sleep(86_400)
        await asyncio.sleep(0.5)
        return start, clock.now(), clock.wall()

    real = RealClock()
    before = real.now()
    assert run_virtual(main()) == (0.0, 86_400.5, 86_400.5)
    assert real.now() - before < 10


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_sleepers_wake_in_the_order_of_their_times(delays: list[float]) -> None:
    async def main() -> list[tuple[float, float]]:
        woken: list[tuple[float, float]] = []

        async def sleeper(delay: float) -> None:
            await asyncio.sleep(delay)
            woken.append((VirtualClock().now(), delay))

        async with asyncio.TaskGroup() as group:
            for delay in delays:
                group.create_task(sleeper(delay))
        return woken

    woken = run_virtual(main())
    assert [delay for _, delay in woken] == sorted(delays)
    assert all(now == pytest.approx(delay, abs=1e-6) for now, delay in woken)


def test_time_stands_still_while_anything_can_run() -> None:
    async def main() -> float:
        async def busy() -> None:
            for _ in range(1000):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(busy())
            group.create_task(busy())
        return VirtualClock().now()

    assert run_virtual(main()) == 0.0


def test_waiting_for_what_never_comes_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlock, match="every task waits"):
        run_virtual(main())


def test_two_tasks_that_wait_for_each_other_are_found() -> None:
    async def main() -> None:
        left, right = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            await left.wait()
            right.set()

        async def second() -> None:
            await right.wait()
            left.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(first())
            group.create_task(second())

    with pytest.raises(VirtualDeadlock):
        run_virtual(main())


def test_deadline_passes_in_no_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return VirtualClock().now()

    assert run_virtual(main()) == 3600.0


def test_error_of_the_program_comes_out_as_it_is() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


def test_blocking_call_takes_no_virtual_time_and_no_thread() -> None:
    async def main() -> tuple[int, int, float]:
        ident = await off_loop(threading.get_ident)
        total = await off_loop(lambda a, *, b: a + b, 1, b=2)
        return ident, total, VirtualClock().now()

    assert run_virtual(main()) == (threading.get_ident(), 3, 0.0)


def test_blocking_call_leaves_a_real_loop_free() -> None:
    async def main() -> int:
        gate = threading.Event()

        async def opener() -> None:
            gate.set()

        async with asyncio.TaskGroup() as group:
            blocked = group.create_task(off_loop(gate.wait, 30))
            group.create_task(opener())
        assert blocked.result()
        return await off_loop(threading.get_ident)

    assert asyncio.run(main()) != threading.get_ident()


def test_real_clock_never_goes_back() -> None:
    clock = RealClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
    assert clock.wall() > 1.6e9


def stand_still(seconds: float) -> None:
    """Let time pass in which this process does nothing, as if a signal had stopped it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._advance(seconds)


def time_until_the_limit(limit: TimeLimit, *stops: tuple[float, float]) -> float:
    """Wait until a limit has passed; ``stops`` says after which time this process is stopped, and for how long."""

    async def wait() -> None:
        async with limit:
            for after_s, for_s in stops:
                await asyncio.sleep(after_s)
                stand_still(for_s)
            await asyncio.Event().wait()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await wait()
        return VirtualClock().now()

    return run_virtual(main())


def test_a_limit_ends_after_its_time() -> None:
    assert time_until_the_limit(TimeLimit(16.0)) == 16.0


def test_the_time_for_which_a_process_was_stopped_does_not_count_in_its_limits() -> None:
    assert time_until_the_limit(TimeLimit(16.0), (4.5, 60.0), (15.0 - 4.5, 1000.0)) == pytest.approx(1076.0, abs=1.0)


def test_the_time_in_which_a_limit_is_held_does_not_count() -> None:
    assert time_until_the_limit(TimeLimit(16.0, is_paused=lambda: 4.5 < VirtualClock().now() < 64.5)) == 76.0


def test_a_body_that_ends_in_time_and_one_without_a_limit_are_left_alone() -> None:
    async def main() -> float:
        for limit in (TimeLimit(16.0), TimeLimit(None)):
            async with limit:
                await asyncio.sleep(15.0)
        await asyncio.sleep(100.0)
        return VirtualClock().now()

    assert run_virtual(main()) == 130.0
