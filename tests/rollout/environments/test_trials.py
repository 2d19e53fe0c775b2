"""The death of an environment worker: the episodes that it had begin again together, and one that kills its worker is
found by halves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.base.types.messages.controller import ModelQuery
from headrace.launch.clients.environment import EpisodeCall
from tests.rollout.environments.pools import running_pool

CODE = """
    import asyncio, os

    async def rollout(task, policy):
        deed, _, detail = task["deed"].partition(" ")
        await policy.chat("hello")
        if deed == "exit":
            os._exit(7)
        await asyncio.sleep(float(detail))
        return 1.0
"""


def test_a_worker_that_is_killed_once_costs_its_episodes_one_more_attempt_and_one_new_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, CODE, "rollout") as at, asyncio.TaskGroup() as group:
            running = group.create_task(at.run(*["wait 1"] * 64))
            await at.asked.wait()
            os.kill(at.children[0].working_pid, signal.SIGKILL)
            assert await running == [1.0] * 64
            assert len(at.children) == 2
            (warning,) = at.warnings
            assert warning.startswith("an environment worker died (environment-0 (pid ")
            assert warning.endswith("; its 64 episodes begin again")

    asyncio.run(main())


def test_episodes_whose_worker_died_begin_again_before_those_that_have_not_begun(tmp_path: Path) -> None:
    async def main() -> None:
        ended: list[str] = []
        async with running_pool(tmp_path, CODE, "rollout", concurrency=2) as at, asyncio.TaskGroup() as group:

            async def episode(name: str) -> None:
                await at.run("wait 0.5")
                ended.append(name)

            for name in ("lost", "lost", "waiting", "waiting"):
                group.create_task(episode(name))
            await at.asked.wait()
            os.kill(at.children[0].working_pid, signal.SIGKILL)
        assert ended == ["lost", "lost", "waiting", "waiting"]

    asyncio.run(main())


def test_a_question_that_comes_as_its_episode_is_given_up_is_not_answered() -> None:
    async def main() -> None:
        nothing: Any = None
        call = EpisodeCall(order=nothing, episode=nothing)

        async def ask_when_cancelled() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                call.ask(nothing, ModelQuery(episode=0, ask=1))

        async def give_up() -> None:
            async with asyncio.TaskGroup() as call.tasks:
                call.tasks.create_task(ask_when_cancelled())
                await asyncio.sleep(0)
                raise ValueError("given up")

        with pytest.raises(ExceptionGroup) as raised:
            await give_up()
        assert [type(error) for error in raised.value.exceptions] == [ValueError]

    asyncio.run(main())


@pytest.mark.slow
def test_the_episode_that_kills_its_worker_is_found_by_halves_and_the_others_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, CODE, "rollout") as at:
            crashed, *others = await at.run("exit", *["wait 0.3"] * 31)
            assert crashed.startswith("env_crashed: the process that ran it died, alone too: environment-")
            assert others == [1.0] * 31
            assert len(at.children) <= 3 + 2 * 5 + 1, "two deaths in shared workers, then two trials a halving"
            assert any("begin again by halves" in warning for warning in at.warnings)
            assert await at.run("wait 0") == [1.0], "the shared worker is there"

    asyncio.run(main())


@pytest.mark.slow
def test_two_episodes_that_kill_their_workers_are_both_found(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, CODE, "rollout") as at:
            found = await at.run("exit", "exit", *["wait 0.3"] * 6)
            assert [str(each).partition(":")[0] for each in found] == ["env_crashed"] * 2 + ["1.0"] * 6

    asyncio.run(main())


def test_a_suspect_that_is_given_up_leaves_its_trial_to_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_pool(tmp_path, CODE, "rollout") as at, asyncio.TaskGroup() as group:
            given_up = group.create_task(at.run("wait 1000", timeout_s=3.0))
            crashed, *others = await at.run("exit", *["wait 0.5"] * 3)
            assert crashed.startswith("env_crashed")
            assert others == [1.0] * 3
            assert await given_up == ["env_timeout"]
            assert await at.run("wait 0") == [1.0]

    asyncio.run(main())
