"""Processes of engines: who is started again, how often, and what is told of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.errors import ComponentDied, ConfigError, DeadlineError, EngineUnfit, HeadraceError, RunError
from headrace.base.types.messages.controller import Committed, Ready
from headrace.base.types.observation import Recovery
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients import EngineClient
from headrace.launch.engines import Engines, engine_names
from headrace.launch.supervision import LAST_MESSAGES_S, SupervisionConfig
from headrace.run.session.running import first_cause
from tests.engine.fleet.mortal import bring


class Quiet(ControllerChannel):
    """A channel to nobody."""

    local_orders = ""

    def __init__(self) -> None:
        pass

    def send(self, message: object) -> None:
        pass

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class Obedient(EngineClient):
    """Does at once what it is told."""

    async def stage(self, update: WeightUpdate) -> float:
        return 0.0

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        return SwapReport(version=version, gap_s=0.0, carried_over=0, restarted=0)


class Process:
    """What :class:`~headrace.launch.child.Child` is to those who keep it."""

    def __init__(self, role: str, pid: int, address: str = "") -> None:
        self.role, self.pid = role, pid
        self.peer = EngineClient(role, Quiet(), token="t", on_spans=lambda _: None, deadline_s=60.0)
        self.closed = False
        self.killed = False
        self._facts = {"weights_address": address}
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ready(self) -> None:
        self.peer.ready.set_result(Ready(token="t", pid=self.pid, facts=self._facts))

    def die(self, how: str = "SIGKILL") -> None:
        self.killed = how.startswith("SIG")
        self._ended.set_result(f"{self.role} (pid {self.pid}) was killed by {how}\n    its last line")

    async def wait_for_death(self) -> str:
        return await self._ended

    async def kill(self) -> None:
        if not self._ended.done():
            self.die("us")

    def close(self) -> None:
        self.closed = True
        self.peer.close()


class Stage:
    """Engines whose processes a test plays."""

    def __init__(self, names: tuple[str, ...], *, restarts: int = 2, **terms: Any) -> None:
        self.lives: dict[str, list[Process]] = {name: [] for name in names}
        self.told: list[Recovery] = []
        settings = {"rolling": None, "start_timeout_s": 30.0, "silence_s": 5.0, "version": 0, **terms}
        self.engines = Engines(self._start, names, SupervisionConfig(restarts=restarts, **settings), VirtualClock())  # type: ignore[arg-type]
        self.engines.learner_owes = lambda: False
        self.engines.send_recoveries_to(self.told.append)

    async def _start(self, name: str) -> Process:
        life = len(self.lives.setdefault(name, []))
        self.lives[name].append(Process(name, 100 * life + len(name), f"at-{name}-{life}"))
        return self.lives[name][-1]

    def now(self, name: str) -> Process:
        return self.lives[name][-1]


async def settle() -> None:
    await asyncio.sleep(0.2)


def test_dead_engine_is_started_again_and_what_happened_is_told_twice() -> None:
    async def main() -> None:
        stage = Stage(("engine-0", "engine-1"))
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            for name in stage.lives:
                stage.now(name).ready()
            await settle()
            assert stage.engines.fleet.names == ("engine-0", "engine-1")
            assert stage.engines.addresses() == ("at-engine-0-0", "at-engine-1-0")
            stage.now("engine-1").die()
            await asyncio.sleep(3.1 + LAST_MESSAGES_S)
            assert stage.lives["engine-1"][0].closed
            assert stage.engines.addresses() == ("at-engine-0-0",)
            stage.now("engine-1").ready()
            await settle()
            assert stage.engines.addresses() == ("at-engine-0-0", "at-engine-1-1")
            running.cancel()
        dead, back = stage.told
        assert dead.seconds is None
        assert back.seconds == pytest.approx(3.1)
        assert str(back) == (
            "engine-1 (pid 8) was killed by SIGKILL; it serves again after 3.1 s, 0 sequences continued"
        )
        assert stage.engines.restarts == {"engine-1": 1}

    run_virtual(main())


def ends_with(stage_of: dict[str, Any], play: Any) -> HeadraceError:
    """What ends the engines' keeping."""

    async def main() -> None:
        stage = Stage(**stage_of)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.engines.run())
            await play(stage)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main())
    cause = first_cause(caught.value)
    assert isinstance(cause, HeadraceError)
    return cause


async def kills_every(stage: Stage, seconds: float, times: int = 1000) -> None:
    for _ in range(times):
        stage.now("engine").ready()
        await asyncio.sleep(seconds)
        stage.now("engine").die()
        await settle()


def test_budget_that_is_used_up_ends_the_run_with_the_cause_and_the_setting() -> None:
    async def play(stage: Stage) -> None:
        await kills_every(stage, 100.0)

    cause = ends_with({"names": ("engine",), "restarts": 2}, play)
    assert isinstance(cause, ComponentDied)
    assert cause.problem.startswith("engine (pid 206) was killed by SIGKILL")
    assert "launch.engine_restarts=2 in 10 minutes are used up" in cause.problem
    assert "then --resume" in cause.remedy


def test_engine_whose_error_uses_up_the_budget_is_told_with_the_remedy_of_that_error() -> None:
    async def play(stage: Stage) -> None:
        for _ in range(3):
            stage.now("engine").ready()
            await settle()
            stage.now("engine").peer.reported_error = RunError("the cache is broken", remedy="mend it")
            stage.now("engine").die("its own hand")
            await settle()

    cause = ends_with({"names": ("engine",), "restarts": 2}, play)
    assert cause.problem.startswith("the cache is broken\n  launch.engine_restarts=2")
    assert cause.remedy.endswith("then --resume: nothing that was finished is lost; mend it")


def test_added_engine_that_cannot_be_started_is_told_with_the_error_itself() -> None:
    async def main() -> None:
        stage = Stage(("engine",))
        await stage.engines.start()

        async def broken(name: str) -> Process:
            raise OSError(28, "No space left on device")

        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await settle()
            stage.engines._start = broken  # type: ignore[assignment]
            with pytest.raises(OSError, match="No space left on device"):
                await stage.engines.add("engine-1")
            assert stage.engines.names == ("engine",)
            running.cancel()

    run_virtual(main())


def test_deaths_that_are_far_apart_never_use_it_up() -> None:
    async def main() -> None:
        stage = Stage(("engine",), restarts=1)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await kills_every(stage, 601.0, times=9)
            running.cancel()
        assert stage.engines.restarts == {"engine": 9}

    run_virtual(main())


def test_without_restarts_the_first_death_ends_the_run() -> None:
    async def play(stage: Stage) -> None:
        await kills_every(stage, 1.0)

    cause = ends_with({"names": ("engine",), "restarts": 0}, play)
    assert cause.problem == "engine (pid 6) was killed by SIGKILL\n    its last line"


@pytest.mark.parametrize("added", [True, False])
def test_without_restarts_the_hang_of_an_engine_ends_the_run_unless_it_is_an_added_one_that_never_served(
    *, added: bool
) -> None:
    problem = (
        "has not answered for 60 s: stage version 0, which the learner has published; it reported last: no weights in "
        "use, 0 steps made, 0 sequences running: it was ended"
    )

    async def play(stage: Stage) -> None:
        async with asyncio.TaskGroup() as group:
            if added:
                await all_obey(stage)
                await bring(stage.engines.fleet, 0)
                adding = asyncio.gather(stage.engines.add("engine-1"), return_exceptions=True)
                await settle()
            stage.now("engine-1" if added else "engine").ready()  # it obeys nothing
            await settle()
            group.create_task(bring(stage.engines.fleet, 0))
            if added:
                (error,) = await adding
                assert isinstance(error, ComponentDied)
                assert error.problem == f"engine-1 {problem}"
                assert error.remedy.startswith("look at logs/engine-1.log"), (
                    "the run goes on: there is nothing to resume"
                )
                assert stage.engines.fleet.names == ("engine",)
                stage.now("engine").die()
            await asyncio.sleep(100.0)

    cause = ends_with({"names": ("engine",), "restarts": 0, "version": NOT_SAMPLED}, play)
    assert isinstance(cause, ComponentDied)
    assert cause.problem.startswith("engine (pid 6) was killed by SIGKILL" if added else f"engine {problem}")
    assert "then --resume" in cause.remedy
    assert added or cause.remedy.endswith("if the machine is only slow, raise sync.deadline_s")


def test_first_start_that_fails_is_told_in_the_words_of_the_engine() -> None:
    async def play(stage: Stage) -> None:
        stage.now("engine").peer.reported_error = ConfigError("the cache does not fit", remedy="lower it")
        stage.now("engine").die()
        await settle()

    assert "the cache does not fit" in ends_with({"names": ("engine",)}, play).problem


def test_engine_that_is_killed_while_a_life_is_starting_is_started_again() -> None:
    async def main() -> None:
        stage = Stage(("engine",), restarts=2)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await asyncio.sleep(25.0)
            stage.now("engine").die()
            await asyncio.sleep(25.0)  # of the start timeout of the second, not of the first
            stage.now("engine").ready()
            await stage.engines.fleet.wait_until_complete()
            running.cancel()
        assert stage.engines.restarts == {"engine": 1}

    run_virtual(main())


def test_engine_that_ends_by_itself_while_a_life_is_starting_ends_the_run() -> None:
    async def play(stage: Stage) -> None:
        stage.now("engine").die("its own hand")
        await settle()

    assert isinstance(ends_with({"names": ("engine",), "restarts": 2}, play), ComponentDied)


def test_first_start_that_takes_too_long_ends_the_run() -> None:
    async def play(_: Stage) -> None:
        await asyncio.sleep(100.0)

    cause = ends_with({"names": ("engine",), "restarts": 2}, play)
    assert isinstance(cause, DeadlineError)
    assert cause.problem == "engine did not start within 30 s"


def test_engine_that_starting_again_would_not_mend_ends_the_run_in_its_words() -> None:
    async def play(stage: Stage) -> None:
        stage.now("engine").ready()
        await settle()
        stage.now("engine").peer.reported_error = EngineUnfit("another run uses the server", remedy="give it its own")
        stage.now("engine").die()
        await settle()

    assert ends_with({"names": ("engine",), "restarts": 2}, play).problem == "another run uses the server"


def test_engine_that_does_not_start_again_in_time_is_ended_and_counts_as_another_death() -> None:
    async def play(stage: Stage) -> None:
        stage.now("engine").ready()
        await settle()
        stage.now("engine").die()
        await asyncio.sleep(100.0)

    cause = ends_with({"names": ("engine",), "restarts": 2}, play)
    assert "did not start within 30 s: it was ended" in cause.problem


NO_SIGN = "has loaded its model, and got no weights: for 30 s nothing showed that any were on their way"


@pytest.mark.parametrize(
    ("state", "owes", "problem", "from_s", "to_s"),
    [
        ("loads", "learner", "did not start within 30 s", 29.0, 32.0),
        ("waits", "nobody", NO_SIGN, 29.0, 32.0),
        ("waits", "learner", NO_SIGN, 129.0, 132.0),
        ("waits", "engine", NO_SIGN, 129.0, 132.0),
        ("waits", "engine-1", NO_SIGN, 129.0, 132.0),
        ("missed", "learner", "gets no weights: version 1 could not be uploaded to at-engine-1-0", 29.0, 32.0),
    ],
)
def test_added_engine_that_does_not_serve_in_time_is_ended_unless_an_answer_is_due_and_the_request_is_told_why(
    state: str, owes: str, problem: str, from_s: float, to_s: float
) -> None:
    async def main() -> None:
        stage, loop = Stage(("engine",), version=NOT_SAMPLED), asyncio.get_running_loop()
        # a step, or an upload of weights, takes that long
        stage.engines.learner_owes = lambda: owes == "learner" and loop.time() < 100.0
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await all_obey(stage)
            await bring(stage.engines.fleet, 0)
            adding = asyncio.gather(stage.engines.add("engine-1"), return_exceptions=True)
            await settle()
            if state != "loads":
                stage.now("engine-1").ready()
                await settle()
            if state == "missed":
                await bring(stage.engines.fleet, 1, missed_by="at-engine-1-0")
            if owes in stage.lives:  # it stages, or commits
                loop.call_at(100.0, stage.now(owes).peer.expect(0, Committed).cancel)
            async with asyncio.timeout(300.0):
                (error,) = await adding
            assert isinstance(error, ComponentDied)
            assert error.problem == f"engine-1 (pid 8) {problem}: it was ended"
            assert from_s < loop.time() < to_s
            assert stage.engines.names == ("engine",)
            running.cancel()
        assert not stage.told, "it never was a part of the run"

    run_virtual(main())


def test_engine_that_is_ended_for_its_silence_is_told_with_the_reason() -> None:
    async def main() -> None:
        stage = Stage(("engine",))
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            stage.now("engine").ready()
            await settle()
            stage.engines.fleet._router.assign(0)
            await asyncio.sleep(10.0)
            stage.now("engine").ready()
            await settle()
            running.cancel()
        assert len(stage.lives["engine"]) == 2
        assert stage.told[0].cause == "engine has said nothing for 5 s and has 1 sequences: it was ended"
        assert [recovery.carried_over for recovery in stage.told] == [1, 1]

    run_virtual(main())


@pytest.mark.parametrize(("names", "waits"), [(("engine-0", "engine-1"), False), (("engine",), True)])
def test_stopped_engine_that_owes_an_answer_is_waited_for_only_where_it_is_the_only_one(
    names: tuple[str, ...], waits: bool
) -> None:
    async def main() -> None:
        stage = Stage(names)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            for name in names:
                stage.now(name).ready()
            await settle()
            stopped = stage.now(names[-1]).peer
            stopped.halted = "is stopped (SIGSTOP)"
            # the deadline of the order, and long after it
            with pytest.raises(TimeoutError if waits else DeadlineError):
                async with asyncio.timeout(60.0):
                    await stopped.answer(asyncio.get_running_loop().create_future(), "staging", 5.0)
            running.cancel()

    run_virtual(main())


@pytest.mark.parametrize(
    ("restarts", "halted", "owes", "replaced"),
    [(2, True, True, True), (2, True, False, False), (2, False, True, False), (0, True, True, False)],
    ids=["stopped and owes", "owes nothing", "works on it", "without restarts"],
)
def test_single_engine_that_is_stopped_and_owes_an_answer_is_replaced_after_the_time_of_silence(
    *, restarts: int, halted: bool, owes: bool, replaced: bool
) -> None:
    async def main() -> None:
        stage = Stage(("engine",), restarts=restarts)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            stage.now("engine").ready()
            await settle()
            first = stage.now("engine").peer
            first.halted = "is stopped (SIGSTOP)" if halted else ""
            staging = group.create_task(bring(stage.engines.fleet, 1)) if owes else None
            await asyncio.sleep(4.0)
            assert len(stage.lives["engine"]) == 1
            await asyncio.sleep(30.0)  # less than the deadline of an order
            assert len(stage.lives["engine"]) == 1 + replaced
            if replaced:
                cause = "engine (pid 6) is stopped (SIGSTOP), and has owed an answer for 5 s: it was ended"
                assert [recovery.cause for recovery in stage.told] == [cause]
                await all_obey(stage)
                await staging  # the new process has staged and committed it
            elif staging is not None:
                assert not staging.done()
                staging.cancel()
            running.cancel()

    run_virtual(main())


async def all_obey(stage: Stage) -> None:
    """Every engine is there, and does at once what it is told."""
    for name in stage.lives:
        stage.now(name).peer = Obedient(name, Quiet(), token="t", on_spans=lambda _: None, deadline_s=60.0)
        stage.now(name).ready()
    await settle()


def test_engine_that_new_weights_do_not_reach_is_told_by_name_and_again_when_it_serves() -> None:
    async def main() -> None:
        stage = Stage(("engine-0", "engine-1"), silence_s=1000.0)
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await all_obey(stage)
            fleet = stage.engines.fleet
            fleet._router.assign(0)
            fleet._router.assign(1)
            await bring(fleet, 1, missed_by="at-engine-1-0")
            assert not stage.told, "it may have died"
            await asyncio.sleep(4.0)
            assert len(stage.told) == 1
            assert stage.engines.addresses() == ("at-engine-0-0", "at-engine-1-0"), "it is asked again"
            await bring(fleet, 2, missed_by="at-engine-1-0")
            await asyncio.sleep(2.0)
            await bring(fleet, 3)
            await settle()
            running.cancel()
        cause = "engine-1 gets no new weights: version 1 could not be uploaded to at-engine-1-0"
        assert [str(told) for told in stage.told] == [
            f"{cause}; it ends its 1 sequences and begins no others until a version reaches it: "
            "open the way from the learner to that address",
            f"{cause}; it serves again after 6.0 s, 1 sequences continued",
        ]
        assert not stage.engines.restarts

    run_virtual(main())


def test_engine_that_new_weights_did_not_reach_because_it_was_dead_is_told_as_dead() -> None:
    async def main() -> None:
        stage = Stage(("engine-0", "engine-1"))
        await stage.engines.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(stage.engines.run())
            await all_obey(stage)
            await bring(stage.engines.fleet, 1, missed_by="at-engine-1-0")
            await asyncio.sleep(1.0)
            stage.now("engine-1").die()
            await asyncio.sleep(10.0)
            running.cancel()
        assert [str(told) for told in stage.told] == [
            "engine-1 (pid 8) was killed by SIGKILL; it is started again, its 0 sequences continue"
        ]

    run_virtual(main())


def test_engines_are_named_by_their_place_where_there_are_several() -> None:
    assert engine_names(1) == ("engine",)
    assert engine_names(3) == ("engine-0", "engine-1", "engine-2")
