"""A run on fakes whose engines are supervised, added and removed as those of a real run: a test plays the processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from headrace.base.clock import VirtualClock
from headrace.base.errors import DeadlineError
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions, SiblingRequest
from headrace.engine.base import OnSiblingChunks
from headrace.engine.config import FleetConfig
from headrace.launch.clients import EngineClient
from headrace.launch.config import LaunchConfig
from headrace.launch.engines import Engines
from headrace.launch.places import EnginePlaces
from headrace.launch.resizing import FleetResizer
from headrace.launch.supervision import SupervisionConfig
from headrace.models.devices import Devices
from tests.engine.fleet.mortal import TogetherMortal
from tests.engine.fleet.test_engines import Process, Quiet


class MortalClient(EngineClient):
    """The client of an engine that dies on demand, which computes in this process."""

    def __init__(self, name: str, length: Callable[[int], int]) -> None:
        super().__init__(name, Quiet(), token="t", on_spans=lambda _: None, deadline_s=60.0)
        self.engine = TogetherMortal(name, length=length, commit_s=0.02)

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        async for chunk in self.engine.generate(prompt_ids_T, sampling, options):
            yield chunk

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        await self.engine.generate_siblings(prompt_ids_T, siblings, on_chunks)

    async def stage(self, update: WeightUpdate) -> float:
        return await self.engine.stage(update)

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        return await self.engine.commit(version, mode)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        self.engine.die()
        super().close()


class MortalProcess(Process):
    """The process of such an engine. It loads for some time, and ends some time after it was ordered to."""

    node = ""
    died_s: float | None = None

    def __init__(self, role: str, pid: int, pace: random.Random, *, fails: bool, length: Callable[[int], int]) -> None:
        super().__init__(role, pid)
        self.peer = MortalClient(role, length)
        self.pace = pace
        if fails:
            asyncio.get_running_loop().call_later(pace.uniform(0.1, 2.0), self.die)
        else:
            asyncio.get_running_loop().call_later(pace.uniform(0.1, 2.0), self._load)

    @property
    def state(self) -> str:
        if self._ended.done():
            return "ended"
        return "ready" if self.peer.ready.done() else "starting"

    def _load(self) -> None:
        if not self._ended.done():
            self.ready()

    def die(self, how: str = "SIGKILL") -> None:
        if not self._ended.done():
            self.died_s = asyncio.get_running_loop().time()
            self.peer.engine.die()
            super().die(how)

    async def shut_down(self, farewell: object) -> None:
        await asyncio.sleep(self.pace.uniform(0.0, 0.5))
        self.die("its order")


class ResizedEngines:
    """The engines of a run that begins with ``count``, and the changes of their number."""

    def __init__(
        self,
        count: int,
        pace: random.Random,
        *,
        failing: float = 0.0,
        length: Callable[[int], int] = lambda _: 10**9,
    ) -> None:
        self.pace, self.failing, self.length = pace, failing, length
        self.processes: list[MortalProcess] = []
        self.log: list[str] = []
        self.notes: list[str] = []
        """What the ledger of a run would keep."""
        self.homeless: set[str] = set()
        """The engines that nobody has room for."""
        self.stuck: set[str] = set()
        """The engines that wait very long for a machine."""
        self.uprooting = 0.0
        """How likely it is that an engine that dies finds no room again, where another engine is there."""
        self.order = order = SimpleNamespace(
            engine=FleetConfig(count=count),
            agents={},
            teachers={},
            devices=Devices(engines=("cpu",) * count, learner=("cpu",)),
            launch=LaunchConfig(),
            model=SimpleNamespace(deterministic=False),
            recorded=None,
        )
        self.places = EnginePlaces(order)  # type: ignore[arg-type]
        self.start_timeout_s = 2.5
        config = SupervisionConfig(restarts=10_000, start_timeout_s=self.start_timeout_s, silence_s=30.0)
        self.engines = Engines(self._start, self.places.policy, config, VirtualClock())  # type: ignore[arg-type]
        self.engines.learner_owes = lambda: False
        processes: Any = SimpleNamespace(
            places=self.places, order=order, starter=None, get_facts=dict, forget_ended=lambda: None
        )
        self.resizer = FleetResizer(processes, self.engines)
        self.resizer.send_changes_to(self._record)

    def _record(self, text: str, *, changed: bool = True, lost: bool = False) -> None:
        self.log.append(text)
        self.notes += [text] if changed else []
        assert lost == (" is lost, " in text)

    async def _start(self, name: str) -> MortalProcess:
        await asyncio.sleep(1000.0 if name in self.stuck else self.pace.uniform(0.0, 0.1))
        uprooted = name in self.engines.children and self.pace.random() < self.uprooting
        stay = [each for each in self.living() if each.role != name and self.engines.will_restart(each.role)]
        if name in self.homeless or (uprooted and stay):
            raise DeadlineError(f"{name} needs 1 CPU, and found no free resources within 30 s", remedy="add nodes")
        fails = name in self.engines._additions and self.pace.random() < self.failing
        pid = 100 * len(self.processes) + 7
        self.processes.append(MortalProcess(name, pid, self.pace, fails=fails, length=self.length))
        return self.processes[-1]

    def living(self) -> list[MortalProcess]:
        """The processes that have not ended."""
        return [process for process in self.processes if process.died_s is None]

    def abandoned(self, now_s: float) -> list[str]:
        """The engines of the run that have no process, and should have been started again."""
        last = {process.role: process for process in self.processes}
        died_s = {name: last[name].died_s for name in self.engines.names if name in last}
        return [name for name, at_s in died_s.items() if at_s is not None and now_s - at_s > 1.0]


def ignore(_: str) -> None:
    """Take the news of a change for granted."""
