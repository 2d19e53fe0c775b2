"""``sync.interrupt = "sleep"``: the engine stands still while the learner has steps to make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.types.batch import Batch
from headrace.base.types.weights import Interrupt
from headrace.testing import FakeEngine, FakeLearner
from tests.control.lives import Plan, live


class Sleeper(FakeEngine):
    asleep = False

    async def pause(self, *, release: bool = False) -> None:
        assert release
        self.asleep = True
        await super().pause(release=release)

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> object:
        self.asleep = False
        return await super().commit(version, mode)


@pytest.mark.parametrize("max_age", [0, 1, 3])
def test_engine_sleeps_through_every_step_and_wakes_at_the_commit_that_leaves_none(
    tmp_path: Path, max_age: int
) -> None:
    engines: list[Sleeper] = []

    class Watcher(FakeLearner):
        def _learn(self, batch: Batch) -> None:
            asleep.append(engines[-1].asleep)
            super()._learn(batch)

    def engine() -> Sleeper:
        engines.append(Sleeper())
        return engines[-1]

    asleep: list[bool] = []
    plan = Plan(
        run_dir=tmp_path,
        flow={"max_age": max_age},
        engine=engine,
        learner=lambda: Watcher(token_s=0.002),
        parts=lambda parts: replace(parts, interrupt=Interrupt.SLEEP),
    )
    life = live(plan)
    assert life.summary.status == "finished"
    assert asleep == [True] * plan.steps
    assert not engines[-1].asleep
