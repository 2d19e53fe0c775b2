"""Runs on fakes in virtual time, through as many lives as a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.clock import run_virtual
from headrace.base.types.batch import Batch
from headrace.base.types.observation import Event, StepRecord
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.base.types.trace import Span
from headrace.control import Components, Controller, ControlSettings, RunSection, Summary
from headrace.control.observer import Observer, Observers
from headrace.control.recovery import find_starting_point
from headrace.control.saving import CHECKPOINTS
from headrace.engine import SiblingRequest
from headrace.engine.base import OnSiblingChunks
from headrace.flow import FlowConfig
from headrace.flow.ledger import InlineWriter, SqliteLedger
from headrace.learner import checkpoint
from headrace.run.session.running import first_cause
from headrace.testing import FakeEngine, FakeLearner, FakeScorer, fake_parts, lognormal_lengths


class RecordingObserver(Observer):
    """An observer that remembers."""

    controller: Controller
    """Of the life that it watches."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.events: list[Event] = []
        self.all_spans: list[Span] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def spans(self, spans: Sequence[Span]) -> None:
        self.all_spans += spans

    def texts(self, level: str = "info") -> str:
        return "\n".join(event.text for event in self.events if event.level == level)


@dataclass(kw_only=True)
class Plan:
    """One run: what is special about it."""

    run_dir: Path
    steps: int = 6
    num_tasks: int = 500
    """More than groups: a batch then says by its prompts which groups it holds."""
    flow: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    engine: Callable[[], Any] = lambda: FakeEngine(length=lognormal_lengths(40, 1.0, 300))
    learner: Callable[[], Any] = lambda: FakeLearner(token_s=0.002)
    scorer: Callable[[], Any] = lambda: FakeScorer(seconds=0.3)
    has_teachers: bool = False
    parts: Callable[[Components], Components] = lambda parts: parts
    """Changes the parts."""

    def settings(self) -> ControlSettings:
        flow = {"groups_per_step": 2, "group_size": 3, "max_age": 1, **self.flow}
        run = {"steps": self.steps, "checkpoint_every": 2, **self.run}
        return ControlSettings(
            run=RunSection(**run),
            flow=FlowConfig(**flow),
            order=lambda number: number % self.num_tasks,
            has_teachers=self.has_teachers,
        )

    def open_ledger(self) -> SqliteLedger:
        config = self.settings().flow
        return SqliteLedger(
            self.run_dir / "ledger.sqlite", group_size=config.group_size, groups_per_step=config.groups_per_step
        )


class SiblingEngine(FakeEngine):
    """A fake engine that samples the answers of a group in one call, as engines of processes do."""

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        async def one(index: int, sibling: SiblingRequest) -> None:
            async for chunk in self.generate(prompt_ids_T, sibling.sampling, sibling.options):
                await on_chunks([(index, chunk)])

        async with asyncio.TaskGroup() as group:
            for index, sibling in enumerate(siblings):
                group.create_task(one(index, sibling))


@dataclass(kw_only=True)
class Life:
    """What one life of a run came to."""

    summary: Summary
    """As it stands at the end, also of a life that crashed."""
    ended: bool
    """Whether the controller came to its end."""
    learner: FakeLearner
    engine: FakeEngine
    controller: Controller
    seen: RecordingObserver
    seconds: float
    began_at: int
    """Steps that its first weights had behind them."""


def live(
    plan: Plan, *, crash_at: float | None = None, stop_at: float | None = None, seen: RecordingObserver | None = None
) -> Life:
    """The run continues from where it is, until it ends, crashes at ``crash_at`` or is asked to stop at ``stop_at``."""
    return run_virtual(_live(plan, crash_at, stop_at, seen or RecordingObserver()))


async def _live(plan: Plan, crash_at: float | None, stop_at: float | None, seen: RecordingObserver) -> Life:
    checkpoint.sweep(plan.run_dir / CHECKPOINTS)
    start = find_starting_point(plan.run_dir)
    learner = plan.learner()
    if start.snapshot is not None:
        learner.restore(start.snapshot)
    given = fake_parts(
        plan.run_dir, engine=plan.engine(), learner=learner, scorer=plan.scorer(), num_tasks=plan.num_tasks
    )
    parts, ledger = plan.parts(given), plan.open_ledger()
    loop = asyncio.get_running_loop()
    try:
        controller = Controller(
            parts, plan.settings(), ledger=ledger, writer=InlineWriter(ledger), observers=Observers([seen])
        )
        seen.controller = controller
        if stop_at is not None:
            loop.call_later(stop_at, controller.stop)
        ended = True
        try:
            async with asyncio.timeout(crash_at):
                summary = await controller.run(start)
        except TimeoutError:
            ended, summary = False, controller.summary("failed", "crash")
        assert ledger.conservation().holds
        return Life(
            summary=summary,
            ended=ended,
            learner=learner,
            engine=parts.engine,
            controller=controller,
            seen=seen,
            seconds=loop.time(),
            began_at=start.step,
        )
    finally:
        ledger.close()


def list_groups(batch: Batch) -> list[int]:
    """The groups of a batch, in order, where every group has a row of its own."""
    starts = np.cumsum(batch.lengths_S) - batch.lengths_S
    return list(dict.fromkeys(batch.ids_N[starts].tolist()))


def with_eval(num_rows: int) -> Callable[[Components], Components]:
    """Adds held-out rows."""

    def change(parts: Components) -> Components:
        tasks = [
            Task(row_index=row, row={"prompt": "?"}, prompt="?", prompt_ids_T=np.array([row], np.int32))
            for row in range(num_rows)
        ]
        return replace(parts, eval_tasks=tasks)

    return change


def run_to_failure(plan: Plan, *, seen: RecordingObserver | None = None) -> BaseException:
    """The error that the run ends with."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - looked into by the caller
        live(plan, seen=seen)
    return first_cause(caught.value)
