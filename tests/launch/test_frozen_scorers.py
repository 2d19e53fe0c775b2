"""Scoring workers that are stopped, or whose controller is: none of their calls is to blame, and none is waited for
without end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import psutil

from headrace.rollout.scoring import Scores
from tests.launch.test_scorer_pool import DEEDS
from tests.launch.workers import running_pool, task
from tests.wings.cluster.test_joining import until

ONE = Scores(rewards=(1.0,))


def stop(pid: int) -> None:
    """Stop a process, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def test_a_worker_that_is_stopped_before_it_has_begun_with_a_call_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.0, within_s=45.0) as at:
            assert await at.score("slow 0") == [ONE]
            stop(at.children[0].working_pid)
            assert await at.score(*["slow 0"] * 3) == [ONE] * 3
            assert len(at.children) == 2
            first, second = at.warnings
            assert first.startswith("a scoring worker has begun with no call for 1 s (scorer-0 ")
            assert "stopped (SIGSTOP; kill -CONT" in first
            assert first.endswith("it is replaced, its calls are made again")
            assert second.startswith("a scoring worker died (scorer-0 ")

    asyncio.run(main())


def test_calls_under_a_worker_that_is_stopped_are_made_again_and_not_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.0, within_s=45.0) as at, asyncio.TaskGroup() as group:
            waiting = group.create_task(at.pool.score(task(), ("together here",)))
            await until((tmp_path / "here").exists)
            stop(at.children[0].working_pid)
            await until(lambda: bool(at.warnings))
            (tmp_path / "come").touch()
            assert await waiting == ONE
            assert "its calls are made again, for its process" in at.warnings[0]

    asyncio.run(main())


def test_a_reward_is_not_late_because_its_controller_was_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, timeout_s=1.0, within_s=45.0) as at, asyncio.TaskGroup() as group:
            waiting = group.create_task(at.pool.score(task(), ("together here",)))
            await until((tmp_path / "here").exists)
            (tmp_path / "come").touch()
            threading.Event().wait(2.5)  # the controller receives nothing and does nothing
            assert await waiting == ONE
            assert not at.warnings

    asyncio.run(main())
