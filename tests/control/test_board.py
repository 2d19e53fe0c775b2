"""The board knows who waits for whom, since when, and who owes an answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import RunError, StallError
from headrace.control import Controller
from headrace.control.board import ActivityBoard, LoopContract, Standstill
from headrace.run.session.training import _add_loop_table

CONTRACTS = tuple(
    LoopContract(name=name, consumes=f"c-{name}", produces=f"p-{name}", waits_for=f"w-{name}", unblocked_by=f"u-{name}")
    for name in ("left", "right")
)


def test_table_says_what_each_loop_does_and_for_how_long() -> None:
    async def main() -> None:
        board = ActivityBoard(CONTRACTS, VirtualClock())
        await asyncio.sleep(1)
        board.set_working("left", "step 3")
        with board.waiting("right", "a batch", on="left"):
            await asyncio.sleep(2)
            left, right = board.table()
            assert (left.loop, left.state, left.what, left.since_s, left.unblocked_by) == (
                "left", "busy", "step 3", 2.0, "",
            )  # fmt: skip
            assert (right.state, right.what, right.since_s, right.unblocked_by) == ("waiting", "a batch", 2.0, "left")
        await asyncio.sleep(5)
        assert board.table()[1].state == "busy"
        for words in ("left", "busy 7 s with step 3", "c-left", "p-right", "w-left", "u-right"):
            assert words in board.describe()

    run_virtual(main())


def test_answers_that_are_owed_are_counted_with_the_oldest_first() -> None:
    async def main() -> None:
        board = ActivityBoard(CONTRACTS, VirtualClock())
        with board.requesting("left", "a reward", provider="workers"):
            await asyncio.sleep(3)
            with board.requesting("left", "a reward", provider="workers"):
                await asyncio.sleep(1)
                assert board.table()[0].what == "not started; 2 × a reward, owed by workers for up to 4 s"
        assert board.table()[0].what == "not started"

    run_virtual(main())


def test_cause_of_an_end_before_every_loop_has_begun_is_told_without_the_table() -> None:
    async def main() -> list[str]:
        board = ActivityBoard(CONTRACTS, VirtualClock())
        controller = cast(Controller, SimpleNamespace(state=SimpleNamespace(board=board)))
        told = []
        for loop in ("left", "right"):
            error = RunError("engine and learner do not agree", remedy="look")
            board.set_working(loop, "a step")
            _add_loop_table(controller, error)
            told.append(error.problem)
        return told

    early, late = run_virtual(main())
    assert early == "engine and learner do not agree"
    assert "busy 0 s with a step" in late


def test_watch_ends_when_nothing_has_moved_and_names_the_oldest_debt() -> None:
    async def main() -> float:
        board = ActivityBoard(CONTRACTS, VirtualClock())
        with board.requesting("right", "tokens", provider="engine"):
            await asyncio.sleep(4)
            with board.requesting("left", "a reward", provider="workers"):
                board.record_progress()
                with pytest.raises(StallError) as stalled:
                    await board.watch(10.0)
        assert "tokens has been owed by engine for 14 s" in str(stalled.value)
        assert "run.stall_timeout_s=10" in str(stalled.value)
        return VirtualClock().now()

    assert run_virtual(main()) == pytest.approx(14.0, abs=1.0)


def test_watch_comes_to_its_end_where_the_clock_hardly_moves() -> None:
    async def main() -> None:
        await asyncio.sleep(1e6 + 0.3)
        board = ActivityBoard(CONTRACTS, VirtualClock())
        for _ in range(50):  # sums of fractions: what is left can be less than the clock can tell
            await asyncio.sleep(0.1)
        with pytest.raises(StallError):
            await board.watch(5.0 + 1e-12)

    run_virtual(main())


@pytest.mark.parametrize("kind", ["progress", "waiting", "asking"])
def test_anything_that_moves_keeps_the_watch_quiet(kind: str) -> None:
    async def main() -> None:
        board = ActivityBoard(CONTRACTS, VirtualClock())

        async def move() -> None:
            for _ in range(20):
                await asyncio.sleep(8)
                if kind == "progress":
                    board.record_progress()
                elif kind == "waiting":
                    with board.waiting("left", "it", on="right"):
                        await asyncio.sleep(0)
                else:
                    with board.requesting("left", "it", provider="right"):
                        await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            watch = group.create_task(board.watch(10.0))
            await move()
            watch.cancel()

    run_virtual(main())


def test_time_in_which_the_controller_itself_was_stopped_is_no_stall() -> None:
    class Jumping(VirtualClock):
        """A clock that ran on while this process did not."""

        ahead_s = 0.0

        def now(self) -> float:
            return super().now() + self.ahead_s

    async def main() -> None:
        clock = Jumping()
        board = ActivityBoard(CONTRACTS, clock)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(board.watch(10.0))
            await asyncio.sleep(5.5)
            clock.ahead_s = 100.0
            await asyncio.sleep(3.0)
            assert not watching.done()
            board.record_progress()
            await asyncio.sleep(9.0)
            watching.cancel()

    run_virtual(main())


def test_a_process_that_is_stopped_for_ever_ends_the_run_after_twelve_timeouts_by_name() -> None:
    async def main() -> None:
        words = "learner (pid 7) is stopped (SIGSTOP; kill -CONT 7 lets it continue), for 120 s"
        stopped = [Standstill(words=words, stopped=True)]
        with pytest.raises(StallError) as stalled:
            await ActivityBoard(CONTRACTS, VirtualClock()).watch(10.0, standstills=lambda: stopped)
        assert VirtualClock().now() == pytest.approx(120.0, abs=1.0)
        assert "for 120 s (12 times run.stall_timeout_s=10, because a process is stopped)" in stalled.value.problem
        assert words in stalled.value.problem

    run_virtual(main())


def test_a_process_that_was_stopped_and_replaced_leaves_the_others_the_whole_timeout() -> None:
    async def main() -> None:
        stopped = [Standstill(words="environment-0 (pid 7) is stopped", stopped=True)]
        board = ActivityBoard(CONTRACTS, VirtualClock())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(board.watch(10.0, standstills=lambda: stopped))
            await asyncio.sleep(30.0)
            stopped.clear()
            await asyncio.sleep(9.0)
            assert not watching.done()
            watching.cancel()

    run_virtual(main())
