"""Environments that hang, crash, block and ask, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, EnvError
from headrace.launch.hosts import environment as host
from headrace.launch.starts import EnvironmentStart, ResourceLimits
from headrace.rollout import EpisodeLimits
from tests.launch.workers import is_alive
from tests.rollout.environments.pools import running_pool

DEEDS = """
    import asyncio, gc, os, re, signal, subprocess, sys, threading, time
    from pathlib import Path

    import headrace

    here = Path(__file__).parent

    async def rollout(task, policy):
        deed, _, detail = task["deed"].partition(" ")
        first = await policy.chat("hello")
        match deed:
            case "fail":
                raise ValueError("the server is gone")
            case "wait":
                await asyncio.sleep(float(detail))
            case "block":
                time.sleep(1000)
            case "spin":  # never lets go of the interpreter's lock
                re.match(r"(a|a)*$", "a" * 64 + "b")
            case "block later":
                asyncio.get_running_loop().call_soon(time.sleep, 1000)
                await asyncio.sleep(1)
            case "exit":
                os._exit(7)
            case "once":
                if not (here / detail).exists():
                    (here / detail).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "child":
                child = subprocess.Popen(["sleep", "1000"])
                (here / "grandchild").write_text(str(child.pid))
                await asyncio.sleep(1000)
            case "cancel":
                raise asyncio.CancelledError
            case "interrupt":
                raise KeyboardInterrupt
            case "text":
                return "1.0"
            case "nan":
                return float("nan")
            case "nothing":
                return None
            case "shout":
                print("x" * 1_000_000)
            case "together":
                replies = await asyncio.gather(*(policy.chat(f"question {n}") for n in range(5)))
                return float(len({reply.turn for reply in replies}))
            case "again":
                more = await policy.chat(["hello", first.message, "again"][0])
            case "leave":
                asyncio.get_running_loop().create_task(policy.chat("unheard"))
                await asyncio.sleep(0)
        return 1.0

    class Stubborn(headrace.Env):
        def reset(self, task):
            self.deed = task["deed"]
            return "hello"

        def step(self, message):
            if self.deed == "hang":
                threading.Event().wait()
            if self.deed == "slow":
                time.sleep(4.0)
            if self.deed == "lock":  # the one under which threads get their calls
                threads = next(each for each in gc.get_objects() if type(each).__name__ == "CallThreads")
                with threads._shutdown_lock:
                    time.sleep(4.0)
            return headrace.StepResult(reward=1.0, done=True)
"""


def test_a_failing_environment_is_named_with_its_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            failed, cancelled, stopped, *others = await at.run("fail", "cancel", "interrupt", "wait 0.1", "shout")
            assert failed == "env_error: ValueError: the server is gone at my_env.py:14"
            assert cancelled.startswith("env_error: CancelledError")
            assert stopped.startswith("env_error: KeyboardInterrupt")
            assert others == [1.0, 1.0]
            assert at.warnings == []

    asyncio.run(main())


def test_what_is_no_reward_fails_its_own_episode_by_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            found = await at.run("text", "nan", "nothing")
            assert [each.partition(":")[0] for each in found] == ["env_error", "reward_nan", "reward_none"]

    asyncio.run(main())


def test_a_row_that_cannot_travel_fails_its_own_episode(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            failed, other = await at.run("\ud800", "wait 0")
            assert failed.startswith("env_error: the row cannot travel: UnicodeEncodeError")
            assert other == 1.0

    asyncio.run(main())


def test_code_that_blocks_the_loop_costs_its_own_episode_and_the_others_begin_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout", block_s=2.0) as at:
            blocked, *others = await at.run("block", *["wait 1"] * 3)
            assert blocked.startswith("env_blocked: its code kept the loop of its worker from turning")
            assert others == [1.0] * 3
            assert at.warnings == ["code of an episode blocks the loop of its worker: the worker is replaced"]
            assert [len(talk.turns) for talk in at.talks[1:]] == [2] * 3

    asyncio.run(main())


def test_an_episode_that_waits_in_our_code_for_what_another_holds_is_not_blamed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "Stubborn", block_s=1.0) as at:
            assert await at.run("lock", *["wait"] * 3) == [1.0] * 4
            assert at.warnings[0] == "an environment worker has fallen silent: it is replaced"
            assert not any("code of an episode blocks" in warning for warning in at.warnings)

    asyncio.run(main())


@pytest.mark.slow
def test_code_that_never_lets_other_code_run_is_found_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout", block_s=1.0) as at:
            spinning, other = await at.run("spin", "wait 2")
            assert spinning.startswith("env_crashed: ")
            assert other == 1.0

    asyncio.run(main())


def test_a_crash_is_laid_to_the_episode_that_crashes_alone_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            crashed, *others = await at.run("exit", *["wait 1"] * 2)
            assert crashed.startswith("env_crashed: the process that ran it died, alone too: environment-")
            assert crashed.endswith("ended with exit code 7")
            assert others == [1.0] * 2
            assert await at.run("once mark", "wait 1") == [1.0] * 2

    asyncio.run(main())


def test_an_episode_that_uses_up_the_threads_of_a_worker_costs_no_other(tmp_path: Path) -> None:
    full, told = tmp_path / "full", tmp_path / "told"
    os.mkfifo(told)
    code = f"""
        import threading, time
        from pathlib import Path

        import headrace

        class Threads(headrace.Env):
            def reset(self, task):
                end = threading.Event()
                try:
                    while task["deed"] == "start" and not Path({str(full)!r}).exists():
                        threading.Thread(target=end.wait, args=(20.0,), daemon=True).start()
                except RuntimeError:
                    Path({str(full)!r}).touch()
                    Path({str(told)!r}).write_text("full")
                    time.sleep(10.0)
                end.set()
                return "hello"

            def step(self, message):
                return headrace.StepResult(reward=1.0, done=True)
    """

    async def main() -> None:
        keep = ResourceLimits(memory_bytes=1 << 30, processes=16)
        async with running_pool(tmp_path, code, "Threads", keep=keep, concurrency=4) as at:
            starting = asyncio.create_task(at.run("start"))
            await asyncio.to_thread(told.read_text)  # waits for the one who writes
            assert await at.run("rest") == [1.0]
            assert await starting == [1.0]

    asyncio.run(main())


def test_an_episode_that_nobody_waits_for_ends_and_so_do_its_processes(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            assert await at.run("wait 1000", timeout_s=0.5) == ["env_timeout"]
            assert await at.run("wait 0") == [1.0]
            assert len(at.children) == 1
            assert await at.run("child", timeout_s=1.0) == ["env_timeout"]
        assert not is_alive(int((tmp_path / "grandchild").read_text()))

    asyncio.run(main())


def test_an_episode_that_ends_with_all_workers_ends_without_another_cause(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            running = asyncio.create_task(at.run("wait 1000"))
            await at.asked.wait()
            at.keeping.cancel()
            await asyncio.wait([at.keeping])
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())


@pytest.mark.slow
def test_a_thread_that_never_returns_costs_its_own_episode_and_the_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "Stubborn") as at:
            async with asyncio.TaskGroup() as group:
                hanging = group.create_task(at.run("hang", timeout_s=1.0))
                others = group.create_task(at.run(*["slow"] * 8))
            assert hanging.result() == ["env_timeout"]
            assert others.result() == [1.0] * 8
            assert await at.run("slow") == [1.0]
            assert [len(talk.turns) for talk in at.talks[1:]] == [2] * 9
            assert at.warnings == [
                "an episode that was given up does not end: its worker is replaced when its others have ended"
            ]

    asyncio.run(main())


def test_questions_at_once_and_questions_that_nobody_waits_for_are_served(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at:
            assert await at.run("together", "leave") == [5.0, 1.0]

    asyncio.run(main())


def test_a_spent_budget_can_be_caught_and_else_is_the_cause(tmp_path: Path) -> None:
    code = """
        from headrace.base.errors import BudgetSpent

        async def rollout(task, policy):
            try:
                while True:
                    await policy.chat("hello")
            except BudgetSpent as spent:
                if task["deed"] == "raise":
                    raise
                return 0.25
    """

    async def main() -> None:
        async with running_pool(tmp_path, code, "rollout") as at:
            at.limits = EpisodeLimits(max_turns=2)
            caught, raised = await at.run("catch", "raise")
            assert caught == 0.25
            assert (
                raised
                == "max_turns: the episode has used up env.max_turns: it is at 2; end it before, or raise env.max_turns"
            )

    asyncio.run(main())


@pytest.mark.slow
def test_more_processes_than_allowed_cost_their_own_episode(tmp_path: Path) -> None:
    code = """
        import asyncio, subprocess

        async def rollout(task, policy):
            await policy.chat("hello")
            started = []
            while task["deed"] == "fork" and len(started) < 60:
                started.append(subprocess.Popen(["sleep", "1000"]))
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            return 1.0
    """

    async def main() -> None:
        async with running_pool(
            tmp_path, code, "rollout", keep=ResourceLimits(memory_bytes=1 << 30, processes=16)
        ) as at:
            forked, other = await at.run("fork", "rest")
            assert forked.partition(":")[0] in ("env_crashed", "env_error")
            assert other == 1.0

    asyncio.run(main())


def test_memory_beyond_the_limit_costs_its_own_episode(tmp_path: Path) -> None:
    code = """
        import asyncio

        async def rollout(task, policy):
            await policy.chat("hello")
            hog = []
            while task["deed"] == "eat":
                hog.append(b"x" * (8 << 20))
                await asyncio.sleep(0)
            await asyncio.sleep(1)
            return 1.0
    """

    async def main() -> None:
        async with running_pool(
            tmp_path, code, "rollout", keep=ResourceLimits(memory_bytes=400 << 20, processes=64)
        ) as at:
            eaten, other = await at.run("eat", "rest")
            assert eaten.partition(":")[0] in ("env_crashed", "env_error")
            assert other == 1.0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "entry", "words"),
    [
        ("import nothing_of_that_name\nasync def rollout(): ...", "rollout", "my_env.py"),
        ("Twice = 3", "Twice", "needs a class that inherits headrace.Env"),
        ("def rollout(task, policy): return 1.0", "rollout", "needs an async function of two parameters"),
        ("async def rollout(task): return 1.0", "rollout", "needs an async function of two parameters"),
        ("x = 1", "Twice", "defines no 'Twice'"),
    ],
)
def test_an_entry_that_cannot_be_used_is_told_in_words(tmp_path: Path, code: str, entry: str, words: str) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, code, entry):
            pass

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(main())
    error: BaseException = raised.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, EnvError | ConfigError)
    assert words in error.problem


def test_a_worker_that_is_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, DEEDS, "rollout") as at, asyncio.TaskGroup() as group:
            running = group.create_task(at.run("wait 1", "wait 1"))
            await at.asked.wait()
            os.kill(at.children[0].working_pid, signal.SIGKILL)
            assert await running == [1.0, 1.0]

    asyncio.run(main())


def test_a_worker_says_who_it_is_before_its_watch_may_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Watch:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def begin(self) -> None:
            order.append("watch")

    class Channel:
        def send(self, message: object) -> None:
            order.append(type(message).__name__)

        def receive(self, _: float) -> list[object]:
            raise EOFError

    monkeypatch.setattr(host, "_LoopWatchdog", Watch)
    (tmp_path / "rollout.py").write_text("async def rollout(task, policy):\n    return 1.0\n")
    start = EnvironmentStart(kind="rollout", entry=f"{tmp_path}/rollout.py:rollout", concurrency=1, block_s=10.0)
    channel: Any = Channel()
    with pytest.raises(BaseExceptionGroup):
        host.run_environment(start, channel)
    assert order == ["Ready", "watch"]
