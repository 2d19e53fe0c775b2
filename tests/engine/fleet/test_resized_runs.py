"""Engines that are added and removed while a run goes on, on fakes in virtual time: nothing is lost, whatever happens
between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.clock import run_virtual
from headrace.base.errors import ConfigError, DeadlineError, HeadraceError
from headrace.base.types.weights import Interrupt
from headrace.control import Components
from headrace.control.controller import ENGINES
from headrace.run.session.repeating import ReplayRecording
from headrace.run.session.running import first_cause
from headrace.wings.servers.client.config import ServerConfig
from tests.control.lives import Plan, RecordingObserver, live
from tests.engine.fleet.mortal import bring, sample
from tests.engine.fleet.resized import ResizedEngines, ignore
from tests.engine.fleet.test_runs_on_fakes import LENGTH, whole


def resized(
    count: int, play: Callable[[ResizedEngines], Coroutine[Any, Any, None]], *, failing: float = 0.0, seed: int = 0
) -> ResizedEngines:
    """The engines after ``play``, which begins when all of them serve version 0."""

    async def main() -> ResizedEngines:
        made = ResizedEngines(count, random.Random(seed), failing=failing)
        await made.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(made.engines.run())
            await made.engines.wait_until_complete()
            await bring(made.engines.fleet, 0)
            await play(made)
            running.cancel()
        return made

    return run_virtual(main())


async def catching_up(made: ResizedEngines) -> None:
    """Bring the newest version to engines that come late, as the sync loop does."""
    while True:
        await made.engines.fleet.wait_for_lagging()
        await bring(made.engines.fleet, made.engines.fleet.version)


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
def test_removed_engine_ends_what_it_has_or_others_continue_it_and_its_process_ends(drain_s: float) -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(sample(made.engines.fleet, seed)) for seed in range(20)]
            await asyncio.sleep(0.1)
            (removed,) = [process for process in made.processes if process.role == "engine-1"]
            names = await made.resizer.remove("", 1, drain_s, ignore)
            assert names == ("engine-1",)
            assert removed._ended.done()
            assert removed.closed
            late = [group.create_task(sample(made.engines.fleet, seed)) for seed in range(20, 25)]
        assert len(removed.peer.engine.asked) < 20, "it gets nothing new"
        moved = [options for options in made.processes[0].peer.engine.asked if options.answer_ids_T is not None]
        others = f"; {len(moved)} of its sequences continue on other engines" if moved else ""
        assert made.log == [f"engine-1 was removed{others}; 1 engine serves"]
        assert bool(moved) == (drain_s == 0.0)
        assert all(task.result() for task in (*answers, *late))
        assert made.engines.names == made.engines.fleet.names == made.places.policy == ("engine-0",)

    made = resized(2, play)
    assert not made.engines.restarts


def test_added_engines_serve_under_the_first_free_names_and_share_the_work() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            assert await made.resizer.add(2, ignore) == ("engine-1", "engine-2")
            assert made.engines.serving == ("engine", "engine-1", "engine-2")
            await made.resizer.remove("engine-1", 1, 0.0, ignore)
            assert await made.resizer.add(1, ignore) == ("engine-1",)
            for answer in [group.create_task(sample(made.engines.fleet, seed)) for seed in range(30)]:
                await answer
            late.cancel()
        assert all(process.peer.engine.asked for process in made.living())
        assert [each.state for each in made.resizer.status()] == ["serving"] * 3

    assert resized(1, play).engines.fleet.stats().version == 0


def test_added_engine_that_ends_before_it_serves_is_forgotten_and_the_run_goes_on() -> None:
    async def play(made: ResizedEngines) -> None:
        with pytest.raises(ConfigError, match=r"engine-1, engine-2 were not added: engine-1 \(pid \d+\) was killed"):
            await made.resizer.add(2, ignore)
        assert made.engines.names == made.places.policy == ("engine",)
        await sample(made.engines.fleet, 3)

    made = resized(1, play, failing=1.0)
    assert not made.engines.restarts, "it does not count as a death"
    assert not made.notes, "the run can be replayed"
    assert sorted(text.split(":")[0] for text in made.log) == ["engine-1 was not added", "engine-2 was not added"]


@pytest.mark.parametrize("count", [1, 2])
def test_engine_that_finds_no_room_again_is_lost_whether_it_was_added_or_not_and_can_be_added_again(count: int) -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            if count == 1:
                await made.resizer.add(1, ignore)
            answers = [group.create_task(sample(made.engines.fleet, seed)) for seed in range(20)]
            await asyncio.sleep(0.1)
            made.homeless.add("engine-1")
            next(process for process in made.living() if process.role == "engine-1").die()
            assert all([await answer for answer in answers])
            first = made.engines.names[0]
            assert made.engines.names == made.engines.fleet.names == made.places.policy == (first,)
            why = "engine-1 needs 1 CPU, and found no free resources within 30 s"
            assert made.log[-1] == f"engine-1 is lost, since it could not be started again: {why}; 1 engine serves"
            assert made.notes == made.log
            assert [(each.name, each.state) for each in made.resizer.status()] == [
                (first, "serving"), ("engine-1", "lost"),
            ]  # fmt: skip
            made.homeless.clear()
            assert await made.resizer.add(1, ignore) == ("engine-1",)
            await made.resizer.remove("engine-1", 1, 0.0, ignore)
            assert [each.state for each in made.resizer.status()] == ["serving"], "it is not lost for ever"
            late.cancel()

    resized(count, play)


def test_engine_that_finds_no_room_again_is_lost_while_another_one_is_being_started_again() -> None:
    async def play(made: ResizedEngines) -> None:
        made.homeless.add("engine-1")
        made.processes[1].die()
        await asyncio.sleep(0.03)
        made.processes[0].die()  # it still waits for its place when engine-1 has found none
        await asyncio.sleep(0.2)
        assert made.engines.names == ("engine-0",)
        assert made.log[-1].endswith("found no free resources within 30 s; 0 engines serve")
        await asyncio.sleep(3.0)
        assert made.engines.fleet.names == ("engine-0",), "it has loaded its model again"

    resized(2, play)


def test_last_engine_that_finds_no_room_again_ends_the_run_with_the_reason() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            adding = group.create_task(made.resizer.add(1, ignore))  # it never gets weights
            await asyncio.sleep(0.3)
            made.homeless.add("engine")
            made.processes[0].die()
            await adding

    with pytest.raises(BaseExceptionGroup) as caught:
        resized(1, play)
    cause = first_cause(caught.value)
    assert isinstance(cause, DeadlineError)
    assert "engine needs 1 CPU, and found no free resources" in str(cause)


def test_engine_that_is_started_again_can_be_removed_meanwhile_and_the_last_that_serves_cannot() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            next(process for process in made.processes if process.role == "engine-0").die()
            await asyncio.sleep(0.2)
            assert made.engines.status("engine-0") == "starting"
            with pytest.raises(ConfigError, match="no other engine would serve; engine-0 is starting"):
                await made.resizer.remove("engine-1", 1, 0.0, ignore)
            with pytest.raises(ConfigError, match="engine-0, engine-1 cannot be removed"):
                await made.resizer.remove("", 2, 0.0, ignore)
            with pytest.raises(ConfigError, match="engine-7 is not an engine of this run"):
                await made.resizer.remove("engine-7", 1, 0.0, ignore)
            await made.resizer.remove("engine-0", 1, 0.0, ignore)
            assert made.engines.names == ("engine-1",)
            with pytest.raises(ConfigError, match="engine-1 cannot be removed: no other engine would serve"):
                await made.resizer.remove("engine-1", 1, 0.0, ignore)
            late.cancel()
        assert [process.role for process in made.living()] == ["engine-1"]

    resized(2, play)


def test_engine_that_dies_while_it_is_being_removed_is_not_started_again() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(sample(made.engines.fleet, seed)) for seed in range(8)]
            await asyncio.sleep(0.1)
            removal = group.create_task(made.resizer.remove("engine-1", 1, 60.0, ignore))
            await asyncio.sleep(0.05)
            with pytest.raises(ConfigError, match="engine-1 is being removed or added already"):
                await made.resizer.remove("engine-1", 1, 60.0, ignore)
            next(process for process in made.processes if process.role == "engine-1").die()
            await removal
        assert all(answer.result() for answer in answers)

    made = resized(2, play)
    assert len(made.processes) == 2
    assert not made.engines.restarts


def test_engine_that_died_is_not_removed_while_only_one_that_may_never_serve_would_be_left() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            adding = group.create_task(refused_addition(made))
            await asyncio.sleep(0.11)
            made.processes[0].die()
            await asyncio.sleep(0.06)
            assert [made.engines.status(name) for name in made.engines.names] == ["starting"] * 2
            with pytest.raises(ConfigError, match="engine cannot be removed: no other engine would serve; engine-1 is"):
                await made.resizer.remove("engine", 1, 0.0, ignore)
            await adding
        assert made.engines.names == ("engine",)

    resized(1, play, failing=1.0)


def test_two_removals_at_once_leave_one_engine() -> None:
    async def play(made: ResizedEngines) -> None:
        outcomes = await asyncio.gather(
            *(made.resizer.remove(f"engine-{number}", 1, 0.0, ignore) for number in range(2)), return_exceptions=True
        )
        assert outcomes[0] == ("engine-0",)
        assert "engine-1 cannot be removed: no other engine would serve" in str(outcomes[1])
        assert made.engines.serving == ("engine-1",)

    resized(2, play)


@pytest.mark.parametrize("added", [True, False])
def test_engine_that_waits_for_a_machine_is_removed_at_once(*, added: bool) -> None:
    async def play(made: ResizedEngines) -> None:
        now_s = asyncio.get_running_loop().time
        made.stuck.add("engine-1")
        async with asyncio.TaskGroup() as group:
            if added:
                adding = group.create_task(refused_addition(made))
            else:
                made.processes[1].die()
            await asyncio.sleep(1.0)
            waiting = made.resizer.status()[1]
            assert (waiting.name, waiting.state, waiting.pid) == ("engine-1", "starting", 0)
            asked_s = now_s()
            assert await made.resizer.remove("engine-1", 1, 60.0, ignore) == ("engine-1",)
            assert now_s() - asked_s < 1.0
            if added:
                assert "engine-1 was not added: engine-1 was removed before it was started" in await adding
            made.stuck.clear()
            late = group.create_task(catching_up(made))
            assert await made.resizer.add(1, ignore) == ("engine-1",)
            late.cancel()

    resized(1 if added else 2, play)


def test_engines_that_are_being_added_are_counted_when_the_next_change_looks_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    async def refuse_no_room(starter: object, names: tuple[str, ...]) -> None:
        asked.append(names)
        await asyncio.sleep(0.2)
        if len(names) > 1:
            raise ConfigError(f"the cluster has no room for {len(names)} more engines", remedy="add nodes")

    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            outcomes = await asyncio.gather(*(made.resizer.add(1, ignore) for _ in range(2)), return_exceptions=True)
            assert outcomes[0] == ("engine-1",)
            assert isinstance(outcomes[1], ConfigError)
            assert outcomes[1].problem == "the cluster has no room for 2 more engines"
            assert await made.resizer.add(1, ignore) == ("engine-2",)
            assert asked == [("engine-1",), ("engine-1", "engine-2"), ("engine-2",)]
            late.cancel()

    launched_by(monkeypatch, refuse_no_room)
    resized(1, play)


def test_engine_that_is_started_again_is_counted_when_a_change_looks_for_room_unless_it_is_being_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    async def refuse_no_room(starter: object, names: tuple[str, ...]) -> None:
        asked.append(names)

    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            made.stuck.add("engine-1")
            made.processes[1].die()
            await asyncio.sleep(1.0)
            await made.resizer.add(1, ignore)
            await asyncio.gather(made.resizer.remove("engine-1", 1, 0.0, ignore), made.resizer.add(1, ignore))
            assert asked == [("engine-1", "engine-2"), ("engine-3",)]
            late.cancel()

    launched_by(monkeypatch, refuse_no_room)
    resized(2, play)


def launched_by(monkeypatch: pytest.MonkeyPatch, refuse_no_room: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Have a launcher that looks for room so."""
    launcher = SimpleNamespace(refuse_no_room=refuse_no_room)
    monkeypatch.setattr("headrace.launch.resizing.LAUNCHERS", SimpleNamespace(load=lambda kind: launcher))


def test_added_engine_can_be_removed_before_it_serves_and_its_name_is_free_again() -> None:
    async def play(made: ResizedEngines) -> None:
        async with asyncio.TaskGroup() as group:
            late = group.create_task(catching_up(made))
            adding = group.create_task(refused_addition(made))
            await asyncio.sleep(0.11)
            assert made.engines.status("engine-1") == "starting"
            assert await made.resizer.remove("engine-1", 1, 5.0, ignore) == ("engine-1",)
            refused = await adding
            assert "engine-1 was not added: engine-1 was removed" in refused
            assert refused.endswith("remedy: add another one")
            assert "engine-1 was removed; 1 engine serves" in made.log
            assert not made.notes, "the run can be replayed"
            assert await made.resizer.add(1, ignore) == ("engine-1",)
            late.cancel()
        assert made.engines.names == made.places.policy == ("engine", "engine-1")

    resized(1, play)


async def refused_addition(made: ResizedEngines) -> str:
    """Why an engine was not added."""
    with pytest.raises(ConfigError) as refused:
        await made.resizer.add(1, ignore)
    return str(refused.value)


async def refusal(change: Coroutine[Any, Any, Any]) -> str:
    """Why a change was refused."""
    with pytest.raises(ConfigError) as refused:
        await change
    return str(refused.value)


def test_change_of_the_engines_forbids_a_replay_and_an_engine_that_was_not_added_does_not_and_each_loss_is_a_warning(
    tmp_path: Path,
) -> None:
    seen = RecordingObserver()

    def change(parts: Components) -> Components:
        def record() -> None:
            seen.controller.record_engine_change("engine-1 was not added: no GPU", changed=False)
            seen.controller.record_engine_change("engine-1 was added")
            for _ in range(2):
                seen.controller.record_engine_change("engine-1 is lost, since it is gone", lost=True)

        asyncio.get_running_loop().call_later(0.5, record)
        return parts

    plan = Plan(run_dir=tmp_path, steps=1, parts=change)
    live(plan, seen=seen)
    with closing(plan.open_ledger()) as ledger:
        with pytest.raises(ConfigError, match=r"its engines were changed while it ran \(engine-1 was added\)"):
            ReplayRecording._read(tmp_path, None, ledger)  # type: ignore[arg-type]
        assert [kind for kind, _, _ in ledger.notes()].count(ENGINES) == 3
    assert "engine-1 was not added: no GPU" in seen.texts()
    assert seen.texts("warning") == "\n".join(["engine-1 is lost, since it is gone"] * 2)
    assert seen.controller.state.warnings == ["engine-1 is lost, since it is gone (the latest of 2 times)"]


def test_servers_that_the_run_has_not_started_are_neither_added_nor_removed() -> None:
    async def play(made: ResizedEngines) -> None:
        urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
        made.order.engine = SimpleNamespace(count=2, server=ServerConfig(urls=urls))
        for change in (made.resizer.add(1, ignore), made.resizer.remove("", 1, 0.0, ignore)):
            assert "engine.server.urls names the servers of this run" in await refusal(change)

    resized(2, play)


def test_far_too_many_engines_are_refused_before_anything_is_made_for_them() -> None:
    async def play(made: ResizedEngines) -> None:
        made.places.free_names = lambda num: pytest.fail("names were made")  # type: ignore[method-assign]
        assert "1000000000 more would be more than 64" in await refusal(made.resizer.add(10**9, ignore))

    resized(1, play)


class Disturbed:
    """A run whose engines are added, removed and killed at random times."""

    def __init__(self, seed: int, interrupt: Interrupt) -> None:
        self.pace = random.Random(seed)
        self.interrupt = interrupt
        self.changes: list[tuple[str, ...]] = []
        self.under_way: list[float] = []
        """When the changes that have not ended began."""

    def parts(self, parts: Components) -> Components:
        """The parts of the run, with engines that change from now on."""
        self.made = ResizedEngines(self.pace.choice([1, 2, 3]), self.pace, failing=0.2, length=LENGTH)
        self.made.uprooting = 0.2
        loop = asyncio.get_running_loop()
        self.running, self.disturbing = loop.create_task(self._run()), loop.create_task(self._disturb())
        fleet = self.made.engines.fleet
        return replace(parts, engine=fleet, engine_set=fleet, interrupt=self.interrupt)

    async def _run(self) -> None:
        await self.made.engines.start()
        await self.made.engines.run()

    async def _disturb(self) -> None:
        await self.made.engines.wait_until_complete()
        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                await asyncio.sleep(self.pace.uniform(0.0, 0.8))
                group.create_task(self._change(self.pace.randrange(5)))

    async def _change(self, kind: int) -> None:
        """One change; refusals are part of the game."""
        began_s = asyncio.get_running_loop().time()
        self.under_way.append(began_s)
        try:
            if kind <= 1 and len(self.made.places.policy) < 8:
                self.changes.append(await self.made.resizer.add(self.pace.choice([1, 1, 2]), ignore))
            elif kind <= 3:
                name = self.pace.choice(["", *self.made.places.policy])
                drain_s = self.pace.choice([0.0, 0.3, 5.0])
                self.changes.append(await self.made.resizer.remove(name, 1, drain_s, ignore))
            elif living := self.made.living():
                self.pace.choice(living).die()
        except HeadraceError:
            pass
        self.under_way.remove(began_s)


@pytest.mark.parametrize("interrupt", [Interrupt.INFLIGHT, Interrupt.DRAIN])
@pytest.mark.parametrize("seed", range(6))
def test_run_whose_engines_come_go_and_die_at_random_trains_everything_once(
    tmp_path: Path, seed: int, interrupt: Interrupt
) -> None:
    disturbed = Disturbed(seed, interrupt)
    max_age = seed % 3
    life = live(Plan(run_dir=tmp_path, steps=14, flow={"max_age": max_age}, parts=disturbed.parts))
    whole(life, 28)
    assert life.summary.max_token_age <= max_age
    assert life.summary.tokens_generated == life.summary.tokens_trained, "nothing is sampled twice"
    made = disturbed.made
    assert len(disturbed.changes) > 10, "it was disturbed"
    assert disturbed.running.cancelled(), "the engines are supervised to the end"
    assert disturbed.disturbing.cancelled() or disturbed.disturbing.exception() is None
    longest_s = 2 * made.start_timeout_s + 5.0 + 1.0  # to load, to get weights, to end sequences; and to end
    assert longest_s < life.seconds, "the run is long enough to notice a request that waits for ever"
    assert all(life.seconds - began_s < longest_s for began_s in disturbed.under_way), "no request waits for ever"
    assert not made.abandoned(life.seconds)
    assert set(made.engines.fleet.names) <= set(made.engines.names)
    assert {process.role for process in made.living()} <= set(made.engines.names)
