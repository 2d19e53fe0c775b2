"""Takes in what the learner did, step by step, and passes its snapshots on."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec

from headrace.base.errors import NothingToLearn
from headrace.base.types.scored import Learned, ScoredGroup
from headrace.control.board import LoopContract
from headrace.control.groups import have_signal
from headrace.control.loops.feeding import Feeder, Ordered
from headrace.control.loops.syncing import SyncLoop
from headrace.control.recording import StepDone, step_record
from headrace.control.saving import Saver
from headrace.control.state import RunState
from headrace.control.tuning import Tuning


class LearningLoop:
    """Scored groups in, new weights out."""

    contract = LoopContract(
        name="learner",
        consumes="batches of scored groups",
        produces="versions",
        waits_for="a batch; a free weight buffer",
        unblocked_by="scoring, sync",
    )

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver, *, taught: bool) -> None:
        """``taught``: a teacher says what to prefer, where rewards do not."""
        self._state = state
        self._taught = taught
        self._sync = sync
        self._saver = saver
        self._tuning = Tuning(state)
        self._feeder = Feeder(state, sync, saver)
        self._free_since_s = 0.0
        self._without_signal = 0

    async def run(self) -> None:
        """Until the last step, or until asked to stop; every version it made is committed when it returns."""
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
                await self._finish(ordered)
                self._feeder.done()
            watching.cancel()
        await self._sync.drained()
        await self._saver.save_if_new(state.flow.state.version)

    async def _finish(self, ordered: Ordered) -> None:
        """One step, from the order to the record."""
        state = self._state
        clock = state.parts.clock
        state.board.working("learner", f"step {ordered.step}")
        waited_s = max(0.0, ordered.ordered_s - self._free_since_s)
        if waited_s:
            self._tell_wait(ordered)
        report, trained_s = await ordered.trained
        if ordered.masked:
            dropped = Counter(report.dropped_tokens) + Counter(ordered.masked)
            report = msgspec.structs.replace(report, dropped_tokens=dict(dropped))
        keys = [episode.key for group in ordered.groups for episode in group.scored]
        learned = Learned.of(keys, ordered.batch, report.log_pi_N, report.taught_N)
        state.flow.trained(ordered.groups, report, ordered.ages, learned)
        state.board.progress()
        publication = await ordered.snapshot
        self._sync.publish(publication)
        blocked_s = max(0.0, ordered.slot_s - trained_s)
        if blocked_s:
            state.span("learner", "wait sync", trained_s, ordered.step + 1, end_s=ordered.slot_s)
        self._free_since_s = clock.now()
        done = StepDone(
            groups=ordered.groups,
            seen=ordered.seen,
            ordered_s=ordered.ordered_s,
            report=report,
            ages=ordered.ages,
            waited_s=waited_s,
            exposed_s=blocked_s + publication.exposed_s,
        )
        self._count(done, publication.exposed_s)
        self._tuning.after_step(report, ordered.ages)
        record = step_record(state, done)
        state.tally.rewards.append(record.reward_mean)
        if state.tally.reward_first is None:
            state.tally.reward_first = record.reward_mean
        state.observers.step(record)
        self._stop_without_signal(ordered.groups)
        if ordered.saving is not None:
            await self._saver.finish(ordered.saving)
            self._free_since_s = clock.now()

    def _tell_wait(self, ordered: Ordered) -> None:
        """Until the last episode of the batch had ended the learner waited for episodes, from then on for rewards and
        for the batch itself."""
        since_s = self._free_since_s
        last_s = min(max(ordered.seen.ends_s, default=since_s), ordered.ordered_s)
        if last_s > since_s:
            self._state.span("learner", "wait batch", since_s, ordered.step, end_s=last_s)
        if ordered.ordered_s > max(since_s, last_s):
            self._state.span("learner", "wait rewards", max(since_s, last_s), ordered.step, end_s=ordered.ordered_s)

    def _count(self, done: StepDone, copying_s: float) -> None:
        tally = self._state.tally
        tally.steps_done = done.report.step + 1
        tally.tokens_trained += done.report.trained_tokens
        tally.dropped_tokens.update(Counter(done.report.dropped_tokens))
        tally.ages.update(done.ages)
        tally.exposed_sync_s += done.exposed_s
        tally.learner_busy_s += done.report.seconds + copying_s

    def _stop_without_signal(self, groups: list[ScoredGroup]) -> None:
        state = self._state
        masked = not any(group.scored for group in groups)
        has_signal = have_signal(groups) or (self._taught and not masked)
        self._without_signal = 0 if has_signal else self._without_signal + 1
        if self._without_signal == 0:
            return
        if masked and self._without_signal >= state.flow_config.max_idle_batches:
            raise NothingToLearn(
                f"{self._without_signal} steps in a row had nothing to learn from, and the last of them not one "
                "answer: flow.filters have masked all of them",
                remedy="raise engine.max_new_tokens if answers are cut off, or flow.max_idle_batches; then --resume",
            )
        if masked:
            state.warn("flow.filters have masked every answer of a batch: its step changes no weight")
            return
        whole = "batch" if state.flow_config.group_size == 1 else "group"
        if self._without_signal >= state.flow_config.max_idle_batches:
            reward = next(episode.reward for group in groups for episode in group.scored)
            raise NothingToLearn(
                f"in {self._without_signal} steps in a row all episodes of a {whole} got the same reward (the last: "
                f"{reward:g}): there is nothing to prefer",
                remedy="look at completions and reward; make tasks easier or harder, raise flow.group_size or "
                "engine.temperature, or raise flow.max_idle_batches; then --resume",
            )
        if self._without_signal >= max(2, state.flow_config.max_idle_batches // 2):
            state.warn(f"the rewards of a {whole} are all equal, for many steps in a row: there is nothing to prefer")
