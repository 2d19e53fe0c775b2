"""Trains batches, one optimizer step each, and takes the snapshots."""

from __future__ import annotations

from collections import Counter

import numpy as np

from headrace.control.board import LoopContract
from headrace.control.groups import has_signal
from headrace.control.loops.syncing import SyncLoop
from headrace.control.recording import step_record
from headrace.control.saving import Saver
from headrace.control.state import RunState
from headrace.errors import NothingToLearn
from headrace.learner.base import Publication
from headrace.types.batch import Batch
from headrace.types.messages.controller import StepReport
from headrace.types.scored import ScoredGroup, paths


class LearningLoop:
    """Scored groups in, new weights out."""

    contract = LoopContract(
        name="learner",
        consumes="batches of scored groups",
        produces="versions",
        waits_for="a batch; a free weight buffer",
        unblocked_by="scoring, sync",
    )

    def __init__(self, state: RunState, sync: SyncLoop, saver: Saver) -> None:
        self._state = state
        self._sync = sync
        self._saver = saver
        self._without_signal = 0

    async def run(self) -> None:
        """Until the last step, or until asked to stop; every version it made is committed when it returns."""
        state = self._state
        while not state.stop_asked:
            waited_from = state.parts.clock.now()
            groups = await self._next_batch()
            if groups is None:
                break
            waited_s = state.parts.clock.now() - waited_from
            state.span("learner", "wait batch", waited_from, state.flow.state.next_step - 1)
            await self._step(groups, waited_s)
        await self._sync.drained()
        if not self._saver.has_saved(state.flow.state.version):
            await self._saver.save(state.flow.state.version)

    async def _next_batch(self) -> list[ScoredGroup] | None:
        state = self._state
        while not (state.stop_asked or state.flow.finished):
            groups = state.flow.take()
            if groups is not None:
                return groups
            ready, needed = len(state.flow.state.ready), state.flow_config.groups_per_step
            with state.board.waiting("learner", f"a batch ({ready} of {needed} groups ready)", on="scoring"):
                await state.flow.changed.wait()
        return None

    async def _step(self, groups: list[ScoredGroup], waited_s: float) -> None:
        state = self._state
        step = state.flow.state.next_step - 1
        state.board.working("learner", f"step {step}")
        await state.flow.flush()  # what is trained must be known to have been taken
        batch = self._collate(step, groups)
        ages = batch.ages()
        oldest = int(ages.max(initial=0))
        assert oldest <= state.flow_config.max_age, f"step {step} would train a token of age {oldest}"
        report = await state.parts.learner.train(batch)
        histogram = {int(age): int(count) for age, count in zip(*np.unique(ages, return_counts=True), strict=True)}
        state.flow.trained(groups, report, histogram)
        state.board.progress()
        exposed_s = await self._publish(step + 1)
        self._count(report, histogram, exposed_s)
        record = step_record(state, groups, report, ages=histogram, waited_s=waited_s, exposed_s=exposed_s)
        state.tally.rewards.append(record.reward_mean)
        state.observers.step(record)
        self._stop_without_signal(groups)
        if (step + 1) % state.run.checkpoint_every == 0:
            await self._saver.save(step + 1)

    def _collate(self, step: int, groups: list[ScoredGroup]) -> Batch:
        episodes = [episode for group in groups for episode in group.scored]
        credited = self._state.parts.advantages(groups)
        samples = [paths(episode, float(credit)) for episode, credit in zip(episodes, credited, strict=True)]
        return Batch.collate(step, [sample for of_episode in samples for sample in of_episode])

    async def _publish(self, version: int) -> float:
        """Snapshot and hand over; returns the seconds that training stood still for it."""
        state = self._state
        start_s = state.parts.clock.now()
        with state.board.waiting("learner", "a free weight buffer", on="sync"):
            slot = await self._sync.free_slot()
        waited_s = state.parts.clock.now() - start_s
        if waited_s > 0.001:
            state.span("learner", "wait sync", start_s, version)
        publication: Publication = await state.parts.learner.snapshot(version, slot)
        self._sync.publish(publication)
        return waited_s + publication.exposed_s

    def _count(self, report: StepReport, ages: dict[int, int], exposed_s: float) -> None:
        tally = self._state.tally
        tally.tokens_trained += report.trained_tokens
        tally.dropped_tokens.update(Counter(report.dropped_tokens))
        tally.ages.update(ages)
        tally.exposed_sync_s += exposed_s

    def _stop_without_signal(self, groups: list[ScoredGroup]) -> None:
        state = self._state
        self._without_signal = 0 if any(has_signal(group) for group in groups) else self._without_signal + 1
        if self._without_signal == 0:
            return
        reward = groups[0].scored[0].reward
        if self._without_signal >= state.flow_config.max_idle_batches:
            raise NothingToLearn(
                f"in {self._without_signal} steps in a row all episodes of a group got the same reward (the last: "
                f"{reward:g}): there is nothing to prefer",
                remedy="look at completions and reward; make tasks easier or harder, raise flow.group_size or "
                "engine.temperature, or raise flow.max_idle_batches; then --resume",
            )
        if self._without_signal >= max(2, state.flow_config.max_idle_batches // 2):
            state.warn(f"no signal since step {state.flow.state.next_step - self._without_signal}: rewards all equal")
