"""Branches run in the worker that ran their origin, and are told what they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.base.types.episode import AttemptKind
from tests.rollout.environments.pools import RunningPool, running_pool, task
from tests.rollout.models import conversations

ENV = """
    import asyncio, os

    import headrace

    class Telling(headrace.Env):
        async def reset(self, task):
            return "hello"

        async def step(self, message):
            await asyncio.sleep(0.05)  # so that the episodes of a call run at once
            kinds = {"alone": 0.0, "origin": 0.25, "branch": 0.5}
            return headrace.StepResult(reward=os.getpid() + kinds[self.attempt_kind], done=True)
"""


async def ran_in(run: RunningPool, kind: AttemptKind, *seeds: int) -> list[tuple[int, float]]:
    """The processes in which attempts with these seeds ran, all at once, and what they were told that they are."""

    async def one(seed: int) -> tuple[int, float]:
        talk = conversations(lambda _: "ok")
        talk.seed, talk.attempt_kind = seed, kind
        reward = (await run.pool.run(task(""), talk)).reward
        assert reward is not None
        return int(reward), reward % 1

    return list(await asyncio.gather(*map(one, seeds)))


def test_branches_run_in_the_worker_of_their_origin_as_long_as_it_lives(tmp_path: Path) -> None:
    async def body() -> None:
        async with running_pool(tmp_path, ENV, "Telling", num_workers=3) as run:
            origins = await ran_in(run, AttemptKind.ORIGIN, *range(6))
            assert len({process for process, _ in origins}) == 3
            for seed, (process, told) in enumerate(origins):
                assert told == 0.25
                assert await ran_in(run, AttemptKind.BRANCH, *[seed] * 4) == [(process, 0.5)] * 4
            alone = await ran_in(run, AttemptKind.ALONE, *[0] * 6)
            assert {told for _, told in alone} == {0.0}
            assert len({process for process, _ in alone}) == 3
            lost = origins[0][0]
            await next(child for child in run.children if child.pid == lost).kill()
            ((process, told),) = await ran_in(run, AttemptKind.BRANCH, 0)
            assert process != lost
            assert told == 0.5

    asyncio.run(body())
