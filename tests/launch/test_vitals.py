"""A process that is stopped, hangs or takes far longer than usual is told by name; one that works is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headrace.base.clock import VirtualClock, run_virtual
from headrace.base.types.messages.controller import WorkerSeen, Working
from headrace.base.types.trace import Span
from headrace.launch.channel import ChannelAddresses, ControllerChannel
from headrace.launch.clients import RankClient
from headrace.launch.clients.rollout import RolloutClient
from headrace.launch.local import _make_vitals
from headrace.launch.local_process import describe_halted
from headrace.launch.vitals import FIRST_UNIT_FACTOR, Vitals

TIMEOUT_S = 16.0


class Quiet(ControllerChannel):
    """A channel to nobody."""

    local_orders = ""
    addresses = ChannelAddresses(orders="ipc://orders", reports="ipc://reports")

    def __init__(self) -> None:
        pass


class Rank:
    """What :class:`~headrace.launch.child.Child` is to those who look at it: a rank that a test plays."""

    node, state = "another machine", "ready"

    def __init__(self, role: str, *, usual_s: float = 0.4) -> None:
        self.role, self.pid = role, 7
        self.peer = RankClient(role, Quiet(), token="t", on_spans=lambda _: None)
        self.words, self.computed = "", 0.0
        self._usual_s, self._num_units = usual_s, 0

    async def halt_reason(self) -> str:
        return self.words

    async def computed_s(self) -> float:
        return self.computed

    def ends_a_unit(self) -> None:
        self._num_units += 1

    def beats(self, what: str = "micro-batch 3 of 8 of step 2") -> None:
        self.peer.working = Working(num_units=self._num_units, what=what, usual_s=self._usual_s)
        self.peer.heard_s = VirtualClock().now()


class Watched:
    """Ranks under watch, and what was told when."""

    def __init__(self, *ranks: Rank) -> None:
        self.told: list[tuple[float, str]] = []
        self.over: list[tuple[str, bool]] = []
        self.spans: list[Span] = []
        children: Callable[[], Any] = lambda: ranks  # noqa: E731 - typed
        self.vitals = Vitals(
            children=children,
            timeout_s=TIMEOUT_S,
            start_timeout_s=120.0,
            clock=VirtualClock(),
            warn=self._warn,
            on_span=self.spans.append,
        )

    def _warn(self, text: str, *, kind: str, over: bool = False) -> None:
        self.told.append((VirtualClock().now(), text))
        self.over.append((kind, over))

    async def during(self, seconds: int, each_second: Callable[[int], None]) -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.vitals.watch())
            for second in range(seconds):
                each_second(second)
                await asyncio.sleep(1.0)
            watching.cancel()


def test_a_learner_that_neither_ends_a_unit_nor_computes_is_told_within_the_timeout() -> None:
    async def main() -> None:
        rank = Rank("learner")
        at = Watched(rank)
        await at.during(60, lambda _: rank.beats())
        ((told_s, text),) = at.told
        assert told_s < TIMEOUT_S
        for words in ("learner (pid 7) is at micro-batch 3 of 8 of step 2 for", "(usually at most 0.4 s)", "it hangs"):
            assert words in text
        assert at.vitals.num_work_signs == 0
        (standstill,) = at.vitals.standstills()
        assert "learner (pid 7) is at micro-batch 3 of 8 of step 2" in standstill.words
        assert not standstill.stopped
        rank.ends_a_unit()
        await at.during(3, lambda _: rank.beats())
        assert "learner (pid 7) continues: micro-batch 3 of 8 of step 2 took" in at.told[-1][1]
        assert at.over == [("learner hangs", False), ("learner hangs", True)]
        assert at.vitals.standstills() == []

    run_virtual(main())


def test_a_step_of_ten_minutes_whose_micro_batches_end_is_left_alone() -> None:
    async def main() -> None:
        rank = Rank("learner", usual_s=5.0)
        at = Watched(rank)

        def step(second: int) -> None:
            if second % 5 == 0:
                rank.ends_a_unit()
            rank.beats()

        await at.during(600, step)
        assert at.told == []
        assert at.vitals.num_work_signs >= 110

    run_virtual(main())


@pytest.mark.parametrize(("usual_s", "at_most_s"), [(0.4, TIMEOUT_S), (0.0, 2 * FIRST_UNIT_FACTOR * TIMEOUT_S)])
def test_one_micro_batch_that_computes_for_ten_minutes_is_told_of_and_not_ended(
    usual_s: float, at_most_s: float
) -> None:
    async def main() -> None:
        rank = Rank("learner", usual_s=usual_s)
        at = Watched(rank)

        def step(_: int) -> None:
            rank.computed += 0.9
            rank.beats()

        await at.during(600, step)
        ((told_s, text),) = at.told
        assert told_s < at_most_s
        assert usual_s or told_s >= FIRST_UNIT_FACTOR * TIMEOUT_S
        assert "far longer than usual; it computes, so the run waits for it" in text
        assert at.vitals.num_work_signs > 500
        assert at.vitals.standstills() == []

    run_virtual(main())


def test_ranks_that_wait_for_one_that_computes_or_is_stopped_do_not_hang() -> None:
    async def main() -> None:
        first, second = Rank("learner", usual_s=100.0), Rank("learner-1", usual_s=100.0)
        at = Watched(first, second)

        def step(_: int) -> None:
            second.computed += 0.9
            first.beats()
            second.beats()

        await at.during(60, step)
        assert at.told == []
        second.words = "is stopped (SIGSTOP; kill -CONT 7 lets it continue)"
        await at.during(60, lambda _: first.beats())
        assert [text.partition(" (")[0] for _, text in at.told] == ["learner-1"]
        assert any(each.stopped for each in at.vitals.standstills())
        assert "the run ends after 192 s, 12 times run.stall_timeout_s" in at.told[-1][1]
        second.words = ""
        await at.during(5, step)
        assert "was stopped for" in at.told[-1][1]
        assert at.over == [("learner-1 is stopped", False), ("learner-1 is stopped", True)]
        assert {(each.lane, each.name) for each in at.spans} == {("stopped", "learner-1")}
        recorded = sorted((each.start_s, each.end_s) for each in at.spans)
        assert all(end == start for (_, end), (start, _) in pairwise(recorded)), "the trace has it without a gap"
        assert 57 <= recorded[-1][1] - recorded[0][0] <= 63

    run_virtual(main())


def test_a_learner_without_orders_is_left_alone() -> None:
    async def main() -> None:
        rank = Rank("learner")
        at = Watched(rank)
        await at.during(600, lambda _: rank.beats(""))
        assert at.told == []
        assert at.vitals.num_work_signs == 0

    run_virtual(main())


def test_a_learner_whose_heartbeat_is_missing_while_it_owes_an_answer_is_told_of() -> None:
    async def main() -> None:
        rank = Rank("learner")
        at = Watched(rank)
        rank.beats("")
        owed = rank.peer.expect(rank.peer.next_call(), Working)
        await at.during(60, lambda _: None)
        ((_, text),) = at.told
        assert "has shown no heartbeat for" in text
        owed.cancel()

    run_virtual(main())


def test_time_in_which_the_controller_itself_was_stopped_counts_against_no_learner() -> None:
    class Jumping(VirtualClock):
        """A clock that ran on while this process did not."""

        ahead_s = 0.0

        def now(self) -> float:
            return super().now() + self.ahead_s

    async def main() -> None:
        rank = Rank("learner", usual_s=100.0)
        at = Watched(rank)
        at.vitals.clock = clock = Jumping()
        await at.during(3, lambda _: rank.beats())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(at.vitals.watch())
            await asyncio.sleep(0.5)
            clock.ahead_s = 100.0
            await asyncio.sleep(3.0)
            watching.cancel()
        ((_, text),) = at.told
        assert text.startswith("the controller stood still for 100 s: it was stopped")
        ((start_s, end_s),) = [(each.start_s, each.end_s) for each in at.spans if each.name == "controller"]
        assert end_s - start_s == pytest.approx(100, abs=1)
        assert at.vitals.standstills() == []

    run_virtual(main())


@contextmanager
def running(*program: str) -> Iterator[int]:
    process = subprocess.Popen(program)
    try:
        yield process.pid
    finally:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()
        process.wait()


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may belong to another process by then, which psutil does not expect."""
    status = psutil.Process.status
    with running("sleep", "100") as gone, running("sleep", "100") as stopped:
        os.kill(stopped, signal.SIGSTOP)

        def looked_at(process: psutil.Process) -> str:
            if process.pid == gone:
                raise FileNotFoundError(f"/proc/{gone}/stat")
            return status(process)

        monkeypatch.setattr(psutil.Process, "status", looked_at)
        found: dict[int, str] = {}
        while not found:  # the system takes its time
            found = describe_halted([gone, stopped])
        assert list(found) == [stopped]


def test_workers_of_shards_are_looked_at_until_they_or_their_shard_have_ended() -> None:
    async def main() -> dict[str, int]:
        shards = [Rank("rollout-0"), Rank("rollout-1")]
        for number, shard in enumerate(shards):
            peer = RolloutClient(shard.role, Quiet(), token="t")
            peer.workers = tuple(
                WorkerSeen(name=f"environment-{number}-{place}", pid=10 * number + place, state=state)
                for place, state in enumerate(("starting", "ready", "ended"))
            )
            shard.peer = peer  # type: ignore[assignment]
        shards[1].state = "ended"
        order = SimpleNamespace(forks=None, stall_timeout_s=1.0, launch=SimpleNamespace(start_timeout_s=1.0))
        return _make_vitals(SimpleNamespace(children=shards, order=order)).other_pids()  # type: ignore[arg-type]

    assert run_virtual(main()) == {"environment-0-0": 0, "environment-0-1": 1}


def test_a_stopped_process_is_found_and_so_is_one_that_it_has_started() -> None:
    with running("sleep", "100") as alone, running("sh", "-c", "sleep 100; true") as parent:
        assert describe_halted([alone, parent]) == {}
        (child,) = psutil.Process(parent).children()
        for pid in (alone, child.pid):
            os.kill(pid, signal.SIGSTOP)
        found: dict[int, str] = {}
        while len(found) < 2:  # the system takes its time
            found = describe_halted([alone, parent])
        assert found[alone] == f"is stopped (SIGSTOP; kill -CONT {alone} lets it continue)"
        words = f"has started process {child.pid}, which is stopped (SIGSTOP; kill -CONT {child.pid} lets it continue)"
        assert found[parent] == words
        for pid in (alone, child.pid):
            os.kill(pid, signal.SIGCONT)
        while found:
            found = describe_halted([alone, parent])
