"""Limits of the flow that are found while the run goes on: what was measured goes in, and the limit is set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.base.types.messages.controller import StepReport
from headrace.control.state import RunState
from headrace.flow.age_tuning import AgeTuner
from headrace.flow.concurrency import Concurrency

LOOK_S = 1.0
"""How often the engine's cache and queue are looked at."""


class Tuning:
    """Sets ``flow.max_age`` and ``flow.capacity`` where they are ``"auto"``, and tells what it did and why."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._tuner: AgeTuner | None = None

    def after_step(self, report: StepReport, ages: Mapping[int, int]) -> None:
        """A step is made: its metrics may move the bound."""
        flow = self._state.flow
        if flow.config.max_age != "auto":
            return
        tuner = self._tuner or AgeTuner(settings=flow.config.age_tuning, max_age=flow.state.limits.max_age)
        self._tuner, why = tuner.after_step(report.metrics, max(ages, default=0))
        if why:
            flow.set_max_age(self._tuner.max_age)
            self._state.event(why)

    async def watch_engine(self) -> None:
        """Until cancelled: the engine's counters may move the cap."""
        state, flow = self._state, self._state.flow
        if flow.config.capacity != "auto":
            return
        floor = flow.config.groups_per_step
        cap = Concurrency(floor=floor, capacity=floor, seen=state.parts.engine.stats())
        while True:
            await asyncio.sleep(LOOK_S)
            limits = flow.state.limits
            cap, why = cap.observe(
                state.parts.engine.stats(),
                num_running=flow.state.num_running,
                limit=(limits.run_ahead + 1) * limits.batch_size,
            )
            if why:
                flow.set_capacity(cap.capacity)
                state.event(why)
