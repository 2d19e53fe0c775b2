"""The warm pool gives sessions that are ready, alike and apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.base.errors import ConfigError, EpisodeError
from headrace.wings.sandboxes import LIMITS, SandboxSpec
from headrace.wings.sandboxes.pool import SessionPool
from tests.wings.sandboxes.conftest import Sandboxes, any_sandboxes

sandboxes = any_sandboxes


def test_sessions_of_a_pool_begin_alike_are_replaced_and_end_with_it(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        first = await sandboxes.driver.start(SandboxSpec())
        await first.run("echo base > file; mkdir d; cd d; export WORD=here")
        snapshot = await first.snapshot()
        async with SessionPool(sandboxes.driver, snapshot, ready=2) as pool:
            await pool.fill()
            taken = [await pool.take() for _ in range(3)]
            said = [(await session.run("echo $WORD >> ../file; cat ../file; pwd")).stdout for session in taken]
            assert said == ["base\nhere\n/workspace/d\n"] * 3
            await pool.fill()
            spare = await pool.take()
            await spare.stop()
        assert not any(session.ended for session in taken)
        for session in [*taken, first]:
            await session.stop()
        await sandboxes.driver.release(snapshot)
        assert not sandboxes.driver._sessions  # type: ignore[attr-defined]

    sandboxes(body())


def test_a_ready_session_that_has_ended_is_not_given_away(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        async with SessionPool(sandboxes.driver, SandboxSpec(), ready=1) as pool:
            await pool.fill()
            await pool._ready[0].stop()
            session = await pool.take()
            assert not session.ended
            await session.stop()

    sandboxes(body())


def test_a_ready_session_whose_time_is_over_is_not_given_away(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        async with SessionPool(sandboxes.driver, SandboxSpec(life_s=1.5 * sandboxes.pace), ready=1) as pool:
            await pool.fill()
            await asyncio.sleep(2 * sandboxes.pace)
            session = await pool.take()
            assert (await session.run("echo here")).stdout == "here\n"
            await session.stop()

    sandboxes(body())


def test_a_start_that_fails_is_told_to_whom_it_concerns_and_tried_again(sandboxes: Sandboxes) -> None:
    async def body() -> None:
        session = await sandboxes.driver.start(SandboxSpec())
        snapshot = await session.snapshot()
        await session.stop()
        await sandboxes.driver.release(snapshot)
        async with SessionPool(sandboxes.driver, snapshot, ready=1) as pool:
            for _ in range(2):
                with pytest.raises(EpisodeError, match="has been released"):
                    await pool.take()
        wrong = SandboxSpec(limits=replace(LIMITS, processes=0))
        async with SessionPool(sandboxes.driver, wrong, ready=1) as pool:
            with pytest.raises(ConfigError, match="processes=0 leaves nothing"):
                await pool.take()

    sandboxes(body())


def test_a_pool_of_nothing_is_refused(sandboxes: Sandboxes) -> None:
    with pytest.raises(ConfigError, match="ready=0 keeps no session ready"):
        SessionPool(sandboxes.driver, SandboxSpec(), ready=0)
