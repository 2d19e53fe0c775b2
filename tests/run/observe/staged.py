"""Runs in virtual time in which one part is slow, watched as a real run is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.observation import StepRecord
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import WeightUpdate
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.learner.base import Publication
from headrace.run.observe import Accountant
from headrace.testing import FakeEngine, FakeLearner, FakeScorer
from tests.control.lives import Life, Plan, RecordingObserver, live

STEPS = 30


class StagedEngine(FakeEngine):
    """Has room for so many sequences, reads prompts one after the other, and tells what it was busy with."""

    def __init__(self, told: RecordingObserver, *, room: int, prompt_s: float, stage_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._told, self._prompt_s, self._stage_s = told, prompt_s, stage_s
        self._room, self._reading = asyncio.Semaphore(room), asyncio.Lock()
        self._active, self._since, self._prefill_s = 0, 0.0, 0.0

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self._count(waiting=1)
        async with self._room:
            self._count(waiting=-1)
            self._enter()
            if self._prompt_s:
                async with self._reading:
                    self._tell("generate")
                    await asyncio.sleep(self._prompt_s)
                    self._tell("prefill")
            try:
                async for chunk in super().generate(prompt_ids_T, sampling, options):
                    self._tell("generate")
                    yield chunk
            finally:
                self._tell("generate")
                self._active -= 1

    def _enter(self) -> None:
        if not self._active:
            self._since = asyncio.get_running_loop().time()
        self._active += 1

    def _tell(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        if now > self._since:
            self._told.spans([Span(lane="engine", name=name, start_s=self._since, end_s=now)])
            self._prefill_s += (now - self._since) * (name == "prefill")
        self._since = now
        self._stats = msgspec.structs.replace(self._stats, prefill_s=self._prefill_s)

    async def stage(self, update: WeightUpdate) -> float:
        await asyncio.sleep(self._stage_s)
        return await super().stage(update)


class StagedLearner(FakeLearner):
    """Tells what it was busy with."""

    def __init__(self, told: RecordingObserver, **options: Any) -> None:
        super().__init__(**options)
        self._told = told

    async def train(self, batch: Batch) -> StepReport:
        report = await super().train(batch)
        self._tell("forward_backward", report.seconds, batch.step)
        return report

    async def snapshot(self, version: int, slot: int) -> Publication:
        publication = await super().snapshot(version, slot)
        self._tell("snapshot", publication.exposed_s, version)
        return publication

    def _tell(self, name: str, seconds: float, step: int) -> None:
        now = asyncio.get_running_loop().time()
        self._told.spans([Span(lane="learner", name=name, start_s=now - seconds, end_s=now, step=step)])


class Watched(RecordingObserver):
    """Remembers, and keeps the account."""

    def __init__(self) -> None:
        super().__init__()
        self.accountant = Accountant()

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self.accountant.step(record)

    def spans(self, spans: Sequence[Span]) -> None:
        super().spans(spans)
        self.accountant.spans(spans)


@dataclass(kw_only=True)
class Stage:
    """What is slow. As it is, nothing is: engine and learner take about as long."""

    token_s: float = 0.01
    """Of one sequence."""
    length: Callable[[int], int] = lambda seed: 32 + seed % 2
    room: int = 16
    prompt_s: float = 0.0
    stage_s: float = 0.001
    learn_s: float = 0.0006
    """For each token."""
    reward_s: float = 0.01
    flow: dict[str, Any] = field(default_factory=dict)

    def run(self, run_dir: Path) -> tuple[Life, Watched]:
        seen = Watched()
        plan = Plan(
            run_dir=run_dir,
            steps=STEPS,
            run={"checkpoint_every": 1000},
            flow={"groups_per_step": 4, "group_size": 4, "max_age": 2, "lead": 2, **self.flow},
            engine=lambda: StagedEngine(
                seen,
                room=self.room,
                prompt_s=self.prompt_s,
                stage_s=self.stage_s,
                token_s=self.token_s,
                length=self.length,
            ),
            learner=lambda: StagedLearner(seen, token_s=self.learn_s),
            scorer=lambda: FakeScorer(seconds=self.reward_s),
        )
        return live(plan, seen=seen), seen
