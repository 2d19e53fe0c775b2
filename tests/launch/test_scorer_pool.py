"""Rewards that hang, crash and shout, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from headrace.base.errors import EnvError
from headrace.launch import child
from headrace.launch.clients import pool
from headrace.launch.clients.pool import MAX_IDLE_DEATHS
from headrace.launch.hosts import EXIT_REPORTED
from headrace.launch.local_process import computed_s
from headrace.rollout.scoring import Scores
from tests.launch.workers import find_processes, is_alive, running_pool, task

DEEDS = """
    import os, pathlib, re, signal, subprocess, sys, threading, time

    here = pathlib.Path(__file__).parent

    def reward(completion):
        deed, _, detail = completion.partition(" ")
        match deed:
            case "hang":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(here / "child")])
                threading.Event().wait()
            case "spin":  # never lets go of the interpreter's lock
                re.match(r"(a|a)*$", "a" * 64 + "b")
            case "exit":
                os._exit(int(detail or 7))
            case "parent":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", str(here / "child")])
                os._exit(7)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "once":
                if not (here / "been").exists():
                    (here / "been").touch()
                    os._exit(7)
            case "shout":
                print("x" * 1_000_000)
                sys.stderr.write("y" * 1_000_000)
            case "compute":
                until = time.thread_time() + float(detail)
                while time.thread_time() < until:
                    pass
            case "thread":  # as beside a fork bomb: from now on no thread can be started here
                def refuse(self):
                    raise RuntimeError("can't start new thread")
                threading.Thread.start = refuse
            case "raise":
                raise ValueError("as told")
            case "slow":
                time.sleep(float(detail))
            case "together":  # stays until somebody else has come
                (here / detail).touch()
                while not (here / "come").exists():
                    time.sleep(0.01)
        return 1.0
"""

ONE = Scores(rewards=(1.0,))


def test_a_reward_that_hangs_costs_its_own_episode_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.5) as at:
            first = at.children[0]
            hanging, *others = await at.score("hang", *["slow 1"] * 3)
            assert hanging == Scores(rewards=(), failure="reward_timeout: no reward for 1.5 s")
            assert others == [ONE] * 3
            assert first.state == "ended"
            assert not find_processes(tmp_path / "child")
            assert await at.score("slow 0", "shout") == [ONE] * 2  # the replacement serves, whatever is printed
            assert len(at.children) == 2
            assert at.warnings == ["a reward has not returned for 1.5 s: its worker is replaced"]

    asyncio.run(main())


def test_a_reward_beside_which_no_thread_can_be_started_costs_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            assert await at.score("thread") == [ONE]
            assert await at.score(*["slow 0.5"] * 3) == [ONE] * 3

    asyncio.run(main())


def test_a_reward_that_keeps_all_others_from_returning_costs_its_own_episode_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.0) as at:
            *before, spinning, after = await at.score(*["slow 0.3"] * 4, "spin", "slow 0.3")
            assert spinning.failure == "reward_timeout: no reward for 1 s"
            assert [*before, after] == [ONE] * 5
            assert await at.score("slow 0") == [ONE]

    asyncio.run(main())


def test_calls_are_not_made_one_after_the_other_while_all_of_them_block(tmp_path: Path) -> None:
    deeds = """
        import time
        async def reward(completion):
            time.sleep(1000 if completion == "block" else 0)
            return 1.0
    """

    async def main() -> None:
        async with running_pool(tmp_path, deeds, timeout_s=0.3) as at:
            found = await at.score(*["block"] * 40)
            last = "reward_timeout: the last 8 calls blocked their worker for 0.3 s each; let an async def await"
            assert [each.failure for each in found].count("reward_timeout: no reward for 0.3 s") == 9
            assert sum(each.failure.startswith(last) for each in found) == 31
            assert len(at.children) <= 11  # one for each that was late, and one more
            assert await at.score("well") == [ONE], "one is still made"
            assert await at.score(*["well"] * 20) == [ONE] * 20

    asyncio.run(main())


def test_calls_that_wait_behind_late_threads_are_still_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.0) as at:  # 16 threads, all of which are late together
            found = await at.score(*["slow 1000"] * 16, *["slow 0"] * 16)
            assert found[16:] == [ONE] * 16
            assert {each.failure for each in found[:16]} == {"reward_timeout: no reward for 1 s"}

    asyncio.run(main())


def test_calls_that_wait_their_turn_are_not_late(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=2.0) as at:
            assert await at.score(*["slow 0.4"] * 32 * 3) == [ONE] * 96  # 16 at once: six turns
            assert at.warnings == []

    asyncio.run(main())


def test_calls_that_are_late_because_they_compute_together_are_made_again_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=2.0) as at:
            assert await at.score(*["compute 0.25"] * 16) == [ONE] * 16  # together twice the deadline, alone an eighth
            assert len(at.children) > 1

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="what a process waits for is told by Linux alone")
def test_a_worker_that_others_keep_from_the_processor_counts_as_computing() -> None:
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-c", pinned]) for _ in range(4)]
    try:
        while sum(used := [psutil.Process(each.pid).cpu_times().user for each in spinning]) < 1.0:
            assert all(each.poll() is None for each in spinning)
        assert sum(computed_s(each.pid) for each in spinning) > 2 * sum(used), "one of four computes at a time"
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    assert computed_s(spinning[0].pid) == 0


def test_calls_under_a_worker_that_is_replaced_are_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=2.0) as at, asyncio.TaskGroup() as group:
            hanging = group.create_task(at.pool.score(task(), ("hang",)))
            await at.score("slow 1.5")
            waiting = group.create_task(at.pool.score(task(), ("together here",)))
            await hanging  # its worker, and the call that waited there, are gone
            assert (tmp_path / "here").exists()
            assert not waiting.done()
            (tmp_path / "come").touch()
            assert await waiting == ONE

    asyncio.run(main())


def test_a_reward_that_kills_its_process_is_tried_again_and_then_counted(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            crashed, *others = await at.score("killed", *["slow 0.3"] * 4)
            assert crashed == Scores(rewards=(), failure="reward_crashed: the process that computed it died, alone too")
            assert others == [ONE] * 4
            assert len(at.children) == 5
            assert sum("was killed by SIGKILL" in warning for warning in at.warnings) == 3

    asyncio.run(main())


@pytest.mark.parametrize("code", [1, pytest.param(EXIT_REPORTED, marks=pytest.mark.slow)])
def test_a_reward_that_exits_costs_its_own_episode_whatever_its_exit_code(tmp_path: Path, code: int) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, num_workers=2) as at:
            deeds = [f"exit {code}" if number in {7, 19} else "slow 0.05" for number in range(40)]
            for deed, scores in zip(deeds, await at.score(*deeds), strict=True):
                assert scores.failure.startswith("reward_crashed") if deed.startswith("exit") else scores == ONE

    asyncio.run(main())


def test_of_workers_that_die_one_after_the_other_the_last_logs_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "OLD_LOGS", 2)

    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            for _ in range(2):
                await at.score("exit")
            assert await at.score("slow 0") == [ONE]
            living = {f"{each.role}.log" for each in at.children if each.state != "ended"}
            logs = {log.name for log in tmp_path.glob("scorer-*.log")}
            assert len(at.children) > len(living) + 2
            assert living <= logs
            assert len(logs - living) == 2

    asyncio.run(main())


def test_what_a_worker_started_does_not_outlive_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            (crashed,) = await at.score("parent")
            assert crashed.failure.startswith("reward_crashed")
            assert not find_processes(tmp_path / "child")

    asyncio.run(main())


def test_a_row_that_cannot_travel_is_a_failure(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            (scores,) = await at.score("\ud800")
            assert scores.failure.startswith("reward_error: the row cannot travel: UnicodeEncodeError")

    asyncio.run(main())


def test_a_worker_that_dies_by_accident_costs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, num_workers=2) as at:
            assert await at.score("once", "slow 0.2", "slow 0.2", "slow 0.2") == [ONE] * 4
            assert len(at.children) == 3

    asyncio.run(main())


def test_calls_of_a_worker_that_has_died_unnoticed_are_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            pid = at.children[0].pid
            os.kill(pid, signal.SIGKILL)
            while is_alive(pid):  # the event loop, which would notice, stands still
                pass
            threading.Event().wait(0.1)  # its socket is gone too
            assert at.children[0].state == "ready"
            assert await at.score(*["slow 0"] * 3) == [ONE] * 3

    asyncio.run(main())


@pytest.mark.slow
def test_calls_that_kill_their_workers_are_counted_however_many_there_are(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            for scores in await at.score(*["exit"] * (MAX_IDLE_DEATHS + 1)):
                assert scores.failure.startswith("reward_crashed")

    asyncio.run(main())


def test_workers_that_all_die_unasked_end_the_run_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_IDLE_DEATHS", 3)
    dying = "import os, threading; threading.Timer(0.3, os._exit, [7]).start()\ndef reward(completion): ..."

    async def main() -> None:
        async with running_pool(tmp_path, dying):
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(main())
    (cause,) = leaves(ended.value)
    assert isinstance(cause, EnvError)
    assert "3 scoring workers died one after the other" in cause.problem
    assert "exit code 7" in cause.problem
    assert "logs/scorer-2.log" in cause.remedy


def test_a_file_that_cannot_be_imported_is_told_in_its_own_words(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, "import not_a_module\ndef reward(completion): ..."):
            raise AssertionError("it cannot have started")

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(main())
    (cause,) = leaves(ended.value)
    assert isinstance(cause, EnvError)
    assert "No module named 'not_a_module' at reward.py:1" in cause.problem


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [leaf for e in group.exceptions for leaf in (leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


def test_short_calls_for_one_row_are_one_order_and_each_failure_is_that_of_its_completion(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            (worker,) = (slot.worker for slot in at.pool._slots)
            texts = ("slow 0", "none", "slow 0", "slow 0")
            await at.pool.score(task(), texts)
            assert worker.num_started == 4, "how long they take is not known"
            before = 0
            while worker.num_started - before != 1:  # the first calls may take longer
                before = worker.num_started
                scores = await at.pool.score(task(), texts)
                assert scores.rewards == (1.0,) * 4
            scores = await at.pool.score(task(), ("slow 0", "raise", "slow 0"))
            assert worker.num_started == before + 2
            assert [scores.get_graded(place).reward for place in range(3)] == [1.0, None, 1.0]
            assert "ValueError: as told" in scores.get_graded(1).failure

    asyncio.run(main())


@pytest.mark.parametrize("deed", ["exit", "hang"])
def test_of_several_calls_in_one_order_only_the_one_to_blame_fails(tmp_path: Path, deed: str) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.5) as at:
            for _ in range(60):
                await at.pool.score(task(), ("slow 0",))
            scores = await at.pool.score(task(), ("slow 0", deed, "slow 0"))
            reason = {"exit": "reward_crashed", "hang": "reward_timeout"}[deed]
            assert [scores.get_graded(place).reward for place in range(3)] == [1.0, None, 1.0]
            assert scores.get_graded(1).failure.startswith(reason)

    asyncio.run(main())


def test_calls_that_take_long_are_made_side_by_side(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS) as at:
            await at.pool.score(task(), ("slow 0.3",))
            (worker,) = (slot.worker for slot in at.pool._slots)
            scores = await at.pool.score(task(), ("slow 0.3",) * 4)
            assert (scores.rewards, worker.num_started) == ((1.0,) * 4, 5)

    asyncio.run(main())
