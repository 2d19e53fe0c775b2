"""The worlds of tasks outlive the process that makes their sessions, and what is wrong with them is told once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import validate
from headrace.base.errors import ConfigError, EnvError, EpisodeError
from headrace.base.types.episode import AttemptKind
from headrace.rollout.environments.config import EnvConfig
from headrace.wings.sandboxes import SandboxSession
from headrace.wings.sandboxes.environment import ShellSettings
from headrace.wings.sandboxes.local.driver import LocalDriver
from headrace.wings.sandboxes.tasks import TaskDirectory, open_task
from headrace.wings.sandboxes.world import Worlds
from tests.wings.sandboxes.conftest import KINDS, skip_missing
from tests.wings.sandboxes.task_files import HARBOR, write_task

Body = Callable[[Worlds, TaskDirectory], Coroutine[Any, Any, None]]


def in_worlds(task: Path, body: Body, **options: Any) -> None:
    """Run ``body`` in worlds of its own."""

    async def main() -> None:
        worlds = Worlds(ShellSettings(image="machine", **options).worlds)
        try:
            await body(worlds, open_task(task))
        finally:
            await worlds.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_the_host_costs_its_sessions_and_no_later_one(tmp_path: Path, kind: str) -> None:
    skip_missing(kind)

    async def body(worlds: Worlds, task: TaskDirectory) -> None:
        first = await worlds.enter("one", task)
        driver = await worlds.open()
        assert isinstance(driver, LocalDriver)
        os.kill(driver._process.pid, signal.SIGKILL)
        await driver._process.wait()
        with pytest.raises(EpisodeError):
            await first.run("sleep 100")
        later = await asyncio.gather(*(worlds.enter("one", task) for _ in range(3)))
        for session in later:
            assert (await session.run("ls")).ok
            await session.stop()
        assert await worlds.open() is not driver

    in_worlds(write_task(tmp_path / "one", HARBOR), body, sandbox=kind)


@pytest.mark.parametrize("closed", [False, True])
def test_a_branch_whose_snapshots_are_lost_runs_its_commands_again(tmp_path: Path, closed: bool) -> None:
    async def body(worlds: Worlds, task: TaskDirectory) -> None:
        async def run(session: SandboxSession, command: str) -> str:
            return (await session.run(command)).stdout

        origin = await worlds.attempt("one", task, seed=1, kind=AttemptKind.ORIGIN)
        for command in ("echo 1 > log; cat log", "echo 2 >> log; cat log"):
            await origin.keep(command=command, observation=await run(await origin.enter(run), command), left_s=9.0)
        await origin.leave()
        branch = await worlds.attempt("one", task, seed=1, kind=AttemptKind.BRANCH)
        assert branch.repeat("echo 1 > log; cat log") is not None
        driver = await worlds.open()
        assert isinstance(driver, LocalDriver)
        os.kill(driver._process.pid, signal.SIGKILL)
        await driver._process.wait()
        if closed:  # another episode has seen it before
            await (await worlds.enter("one", task)).stop()
        assert await run(await branch.enter(run), "cat log") == "1\n"
        await branch.leave()

    in_worlds(write_task(tmp_path / "one", HARBOR), body)


def test_a_setup_that_fails_is_made_once_for_all_who_wait_and_again_for_those_who_come_later(tmp_path: Path) -> None:
    async def body(worlds: Worlds, task: TaskDirectory) -> None:
        made = 0
        make = worlds._build_snapshot

        async def counted(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            return await make(*arguments)

        worlds._build_snapshot = counted  # type: ignore[method-assign]
        for times in (1, 2):
            ended = await asyncio.gather(*(worlds.enter("one", task) for _ in range(4)), return_exceptions=True)
            reasons = [error.reason for error in ended if isinstance(error, EpisodeError)]
            assert reasons == ["task_setup"] * 4
            assert made == times

    changed = {"environment/Dockerfile": HARBOR["environment/Dockerfile"] + "RUN exit 3\n"}
    in_worlds(write_task(tmp_path / "one", HARBOR, **changed), body)


def test_a_path_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    async def body(worlds: Worlds, task: TaskDirectory) -> None:
        with pytest.raises(EnvError, match=r"readable=\['/nowhere/at/all'\] names what is not on this machine"):
            await worlds.enter("one", task)

    in_worlds(write_task(tmp_path / "one", HARBOR), body, readable=("/usr", "/nowhere/at/all"))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("shell", {"sandbx": "jail"}, "env.options.sandbx is not a setting"),
        ("shell", {"sandbox": "jial"}, "the sandbox 'jial' is not known"),
        ("shell", {"commands": 0}, "env.options.commands=0"),
        ("harness", {}, "env.options.command"),
        ("harness", {"command": "x", "keep": ["/tmp/x"]}, "keep=.*belong together"),
    ],
)
def test_options_are_checked_when_the_run_file_is_read(kind: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(EnvConfig, {"kind": kind, "options": options}, "env")
