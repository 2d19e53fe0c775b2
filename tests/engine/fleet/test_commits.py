"""Versions in a fleet: who commits when, and who gets what when it comes late."""

from __future__ import annotations

import asyncio

import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import NeedsFull
from headrace.base.types.weights import Interrupt
from headrace.engine.fleet import Fleet
from tests.engine.fleet.mortal import FLUSH, TOKEN_S, Mortal, bring, in_virtual_time, kill, make_fleet, sample, update


@in_virtual_time
async def test_commits_roll_k_at_a_time_and_the_others_serve_meanwhile() -> None:
    fleet, engines = make_fleet("a", "b", "c")
    for engine in engines.values():
        engine.commit_s = 1.0
    await bring(fleet, 0)
    await fleet.stage(update(1))
    most, mixed = 0, 0

    async def look() -> None:
        nonlocal most, mixed
        while True:
            held = [engine for engine in engines.values() if engine.committing]
            asked = [len(engine.asked) for engine in held]
            most = max(most, len(held))
            mixed += len({engine.stats().version for engine in engines.values()}) > 1
            await sample(fleet, 1, FLUSH)
            assert asked == [len(engine.asked) for engine in held] or not all(each.committing for each in held)
            assert fleet.version == 0, "not committed before every engine uses it"

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        started_s = VirtualClock().now()
        report = await fleet.commit(1, Interrupt.DRAIN)
        looking.cancel()
    assert VirtualClock().now() - started_s == pytest.approx(3.0)
    assert (most, mixed > 5) == (1, True)
    assert sum(len(engine.asked) for engine in engines.values()) == pytest.approx(3.0 / (FLUSH * TOKEN_S), abs=2)
    assert (fleet.version, report.version, report.mode) == (1, 1, Interrupt.DRAIN)


@pytest.mark.parametrize(
    ("mode", "rolling", "seconds"),
    [
        (Interrupt.INFLIGHT, None, 1.0),
        (Interrupt.INFLIGHT, 2, 2.0),
        (Interrupt.BATCH, None, 4.0),
        (Interrupt.DRAIN, 2, 2.0),
    ],
)
def test_as_many_commit_at_once_as_the_mode_or_the_setting_allows(
    mode: Interrupt, rolling: int | None, seconds: float
) -> None:
    async def main() -> float:
        fleet, engines = make_fleet("a", "b", "c", "d", rolling=rolling)
        await fleet.stage(update(0))
        for engine in engines.values():
            engine.commit_s = 1.0
        await fleet.commit(0, mode)
        return VirtualClock().now()

    assert run_virtual(main()) == pytest.approx(seconds + 2 * TOKEN_S)


@in_virtual_time
async def test_engine_that_dies_in_a_commit_is_left_out_and_its_successor_comes_late() -> None:
    fleet, engines = make_fleet("a", "b", rolling=1)
    await bring(fleet, 0)
    engines["a"].commit_s = engines["b"].commit_s = 1.0
    await fleet.stage(update(1))
    async with asyncio.TaskGroup() as group:
        commit = group.create_task(fleet.commit(1))
        await asyncio.sleep(0.5)
        kill(fleet, engines["a"])
        fleet.add("a", Mortal("a"))
    assert (fleet.version, commit.result().version) == (1, 1)
    await fleet.wait_for_lagging()
    assert fleet.engines_without(1) == ("a",)
    await bring(fleet, 1)
    assert engines["b"].staged == [0, 1], "who has it is left as it is"
    assert fleet.engines_without(1) == ()


@in_virtual_time
async def test_next_version_may_be_announced_only_to_engines_that_use_the_newest() -> None:
    fleet, _ = make_fleet("a", "b")
    assert fleet.engines_in_step() == ("a", "b")
    await bring(fleet, 0)
    fleet.add("c", Mortal("c"))
    assert fleet.engines_in_step() == ("a", "b"), "another version is being staged there"
    await bring(fleet, 0)
    assert fleet.engines_in_step() == ("a", "b", "c")


@pytest.mark.parametrize(
    ("size", "rolling", "mode", "alone"),
    [
        (3, None, Interrupt.INFLIGHT, True),
        (3, 1, Interrupt.INFLIGHT, False),
        (3, None, Interrupt.DRAIN, False),
        (1, None, Interrupt.DRAIN, True),
        (1, None, Interrupt.SLEEP, False),
    ],
)
def test_engines_commit_by_themselves_only_where_none_has_to_wait_for_its_turn(
    size: int, rolling: int | None, mode: Interrupt, alone: bool
) -> None:
    async def main() -> bool:
        return Fleet(VirtualClock(), size=size, rolling=rolling).commits_when_staged(mode)

    assert run_virtual(main()) is alone


@in_virtual_time
async def test_commit_whose_engines_have_all_died_is_made_by_those_that_come() -> None:
    fleet, engines = make_fleet("a")
    await bring(fleet, 0)
    await fleet.stage(update(1))
    engines["a"].commit_s = 1.0
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.commit(1))
        await asyncio.sleep(0.5)
        kill(fleet, engines["a"])
        await asyncio.sleep(30.0)
        assert fleet.version == 0
        fleet.add("a", Mortal("a"))
    assert fleet.version == 1


@in_virtual_time
async def test_engine_that_cannot_use_a_difference_asks_for_the_whole_and_the_others_keep_what_they_have() -> None:
    fleet, engines = make_fleet("a", "b")
    await bring(fleet, 0)
    fleet.add("c", Mortal("c"))
    with pytest.raises(NeedsFull, match="c: version 1 is a difference from 0"):
        await fleet.stage(update(1, base=0))
    assert fleet.engines_without(1) == ("c",)
    await bring(fleet, 1)
    assert engines["a"].staged == [0, 1]
    await fleet.wait_until_serving("c")
