"""The learner loop of the controller. It completes the learner's steps, sends snapshots of the new weights to the sync
loop, and tunes the limits of the flow (the state machine of groups that provides batches)."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from headrace.base.errors import NothingToLearn
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.scored import ScoredGroup
from headrace.control.board import LoopContract
from headrace.control.groups import have_signal
from headrace.control.loops.feeding import Feeder, OrderedStep
from headrace.control.loops.syncing import SyncLoop
from headrace.control.metrics import StepDone
from headrace.control.saving import Saver, Saving
from headrace.control.state import RunState
from headrace.flow.tuning import AgeTuner, Concurrency

LOOK_S = 1.0
"""Seconds between two checks of the engine's cache and queue."""


class LearningLoop:
    """The controller's learner loop. It consumes batches of scored groups and produces new versions of the weights."""

    contract = LoopContract(
        name="learner",
        consumes="batches of scored groups",
        produces="versions",
        waits_for="a batch; a free weight buffer",
        unblocked_by="scoring, sync",
    )

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver, *, has_teachers: bool) -> None:
        """Create the loop. ``state`` is the state of the run, ``sync`` receives the new weights, and ``saver`` writes
        checkpoints. ``has_teachers`` says whether a teacher provides a training signal even if all rewards are
        equal."""
        self._state = state
        self._has_teachers = has_teachers
        self._sync = sync
        self._saver = saver
        self._tuning = Tuning(state)
        self._feeder = Feeder(state, sync, saver)
        self._free_since_s = 0.0
        """The time since which the learner has been free for the next step, in seconds on the clock."""
        self._without_signal = 0
        """Number of steps in a row without a training signal."""
        self._completing: asyncio.Task[None] | None = None
        """The task that completes the newest checkpoint; ``None`` before the first."""

    async def run(self) -> None:
        """Train until the last step, until no rows are left, or until the run is requested to stop. Then wait until all
        versions are committed, and write a checkpoint."""
        state = self._state
        self._free_since_s = state.parts.clock.now()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feeder.run())
            watching = group.create_task(self._tuning.watch_engine())
            while True:
                needed = state.flow_config.groups_per_step
                with state.board.waiting("learner", f"a batch of {needed} scored groups", on="scoring"):
                    ordered = await self._feeder.next()
                if ordered is None:
                    break
                await self._complete_step(ordered)
                if ordered.saving is not None:
                    await self._continue_checkpoint(ordered.saving, group)
                self._feeder.done()
            watching.cancel()
        await self._sync.wait_until_drained()
        await self._saver.save_if_new(state.flow.state.version)

    async def _complete_step(self, ordered: OrderedStep) -> None:
        """Wait until the learner has done an ordered step, publish the new weights, and record the step in the ledger,
        the metrics and the trace."""
        state = self._state
        clock = state.parts.clock
        state.board.set_working("learner", f"step {ordered.step}")
        waited_s = max(0.0, ordered.ordered_s - self._free_since_s)
        if waited_s:
            self._trace_wait(ordered)
        report, trained_s = await ordered.trained
        for problem in report.problems:
            state.warn(f"step {ordered.step}: {problem}", kind="problems of a step")
        if ordered.untrained:
            dropped = Counter(report.dropped_tokens) + Counter(ordered.untrained)
            report = msgspec.structs.replace(report, dropped_tokens=dict(dropped))
        state.flow.record_step_trained(ordered.groups, report)
        state.board.record_progress()
        # The copy of the weights was ordered together with the step, so the learner does not wait for this loop.
        publication = await ordered.snapshot
        self._sync.publish(publication)
        blocked_s = max(0.0, ordered.slot_s - trained_s)
        if blocked_s:
            state.span("learner", "wait sync", trained_s, ordered.step + 1, end_s=ordered.slot_s)
        self._free_since_s = clock.now()
        done = StepDone(
            groups=ordered.groups,
            stats=ordered.stats,
            ordered_s=ordered.ordered_s,
            report=report,
            waited_s=waited_s,
            copied_s=publication.exposed_s,
            exposed_s=blocked_s + publication.exposed_s,
        )
        self._tuning.after_step(report)
        state.observers.step(state.metrics.step_done(done))
        self._stop_without_signal(ordered.groups)

    async def _continue_checkpoint(self, saving: Saving, group: asyncio.TaskGroup) -> None:
        """Wait until the learner has copied its state for the checkpoint ``saving`` and can continue to train; then
        complete the checkpoint in a task of ``group``. Before that, wait until the previous checkpoint is complete."""
        if self._completing is not None:
            with self._state.board.requesting("learner", "the checkpoint before", provider="the disk"):
                await self._completing
        memory = await self._saver.wait_until_copied(saving)
        self._free_since_s = self._state.parts.clock.now()
        self._completing = group.create_task(self._saver.complete(saving, memory))

    def _trace_wait(self, ordered: OrderedStep) -> None:
        """Add the learner's wait for the batch to the trace as two spans: the wait for episodes, until the last episode
        of the batch had ended, and then the wait for rewards and for the batch itself."""
        since_s = self._free_since_s
        last_s = min(max(ordered.stats.ends_s, default=since_s), ordered.ordered_s)
        if last_s > since_s:
            self._state.span("learner", "wait batch", since_s, ordered.step, end_s=last_s)
        if ordered.ordered_s > max(since_s, last_s):
            self._state.span("learner", "wait rewards", max(since_s, last_s), ordered.step, end_s=ordered.ordered_s)

    def _stop_without_signal(self, groups: list[ScoredGroup]) -> None:
        """Warn if a step trained on ``groups`` had no training signal, because all rewards were equal or every answer
        was masked. Raises :class:`~headrace.base.errors.NothingToLearn` after too many such steps in a row."""
        state = self._state
        all_masked = not any(group.scored for group in groups)
        has_signal = have_signal(groups) or (self._has_teachers and not all_masked)
        self._without_signal = 0 if has_signal else self._without_signal + 1
        if self._without_signal == 0:
            return
        if all_masked and self._without_signal >= state.flow_config.max_idle_batches:
            raise NothingToLearn(
                f"{self._without_signal} steps in a row had nothing to learn from, and the last of them not one "
                "answer: flow.filters have masked all of them",
                remedy="raise engine.max_new_tokens if answers are cut off, or flow.max_idle_batches; then --resume",
            )
        if all_masked:
            state.warn("flow.filters have masked every answer of a batch: its step changes no weight")
            return
        unit = "batch" if state.flow_config.group_size == 1 else "group"
        if self._without_signal >= state.flow_config.max_idle_batches:
            reward = next(episode.reward for group in groups for episode in group.scored)
            raise NothingToLearn(
                f"in {self._without_signal} steps in a row all episodes of a {unit} got the same reward (the last: "
                f"{reward:g}): there is nothing to prefer",
                remedy="look at completions and reward; make tasks easier or harder, raise flow.group_size or "
                "engine.temperature, or raise flow.max_idle_batches; then --resume",
            )
        if self._without_signal >= max(2, state.flow_config.max_idle_batches // 2):
            state.warn(f"the rewards of a {unit} are all equal, for many steps in a row: there is nothing to prefer")


class Tuning:
    """The automatic tuning of ``flow.max_age`` and ``flow.capacity``, if these settings are ``"auto"``. It changes the
    limits of the flow and reports each change as an event."""

    def __init__(self, state: RunState) -> None:
        """Create the tuning. ``state`` contains the flow whose limits are tuned."""
        self._state = state
        self._tuner: AgeTuner | None = None
        """The rule that adapts the staleness bound; ``None`` before the first step."""

    def after_step(self, report: StepReport) -> None:
        """Adapt the staleness bound to the metrics of a step and the ages of its tokens, which ``report`` contains, if
        ``flow.max_age`` is ``"auto"``."""
        flow = self._state.flow
        if flow.config.max_age != "auto":
            return
        tuner = self._tuner or AgeTuner(settings=flow.config.age_tuning, max_age=flow.state.limits.max_age)
        self._tuner, change = tuner.after_step(report.metrics, max(report.ages, default=0))
        if change:
            flow.set_max_age(self._tuner.max_age)
            self._state.event(change)

    async def watch_engine(self) -> None:
        """Adapt the capacity to the engine's statistics at regular intervals, until cancelled. Return at once unless
        ``flow.capacity`` is ``"auto"``."""
        state, flow = self._state, self._state.flow
        if flow.config.capacity != "auto":
            return
        floor = flow.config.groups_per_step
        # The capacity starts at one batch, the smallest possible value, and grows while the engine has room.
        cap = Concurrency(floor=floor, capacity=floor, last_stats=state.parts.engine.stats())
        while True:
            await asyncio.sleep(LOOK_S)
            limits = flow.state.limits
            cap, change = cap.observe(
                state.parts.engine.stats(),
                num_running=flow.state.num_running,
                limit=(limits.run_ahead + 1) * limits.batch_size,
            )
            if change:
                flow.set_capacity(cap.capacity)
                state.event(change)
