"""The controller. One program for every world: fakes in a test, processes of one machine, a cluster, a simulator.

     tasks ─▶ rollout ──finished episodes──▶ scoring ──scored groups──▶ flow ──batches──▶ learner
                │ ▲                                                     ▲                    │ snapshot
         prompt │ │ tokens                                  freed slots │                    ▼
                ▼ │                                                     └──── sync ◀──── publication
               engine ◀──── stage while decoding, commit between two steps ────┘

    loop      consumes                     produces                  waits for                    unblocked by
    rollout   slots of the flow, tasks     finished episodes         a free slot, tokens          sync, engine
    scoring   finished episodes            scored groups             episodes, the scorers        rollout, workers
    learner   batches of scored groups     versions                  a batch, a weight buffer     scoring, sync
    sync      published versions           commits, freed slots      a publication, the commit    learner, engine

Every queue is bounded by the flow's slots. Weights are published before the first rollout; a version frees its slots
only when it is committed; the watchdog prints the table above when nothing moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from headrace.base.store import COLUMNS
from headrace.base.types.observation import Event, LiveState, Recovery
from headrace.control.board import ActivityBoard
from headrace.control.config import ControlSettings
from headrace.control.evaluation import Evaluator
from headrace.control.loops import LearningLoop, RolloutLoop, ScoringLoop, SyncLoop
from headrace.control.loops.rollout import FinishedEpisodes
from headrace.control.metrics import RunMetrics, Summary
from headrace.control.observer import Observers
from headrace.control.parts import Components
from headrace.control.probe import measure_mismatch, refuse_unexplained
from headrace.control.recovery import StartingPoint, restore_flow
from headrace.control.saving import Saver
from headrace.control.state import RunState, trainer_state
from headrace.flow import Flow
from headrace.flow.columns import ColumnFiles
from headrace.flow.ledger import Ledger, LedgerWriter
from headrace.flow.ledger.base import Note

T = TypeVar("T")

RECOVERY = "recovery"
"""The kind of the ledger's notes about parts that died and were started again."""
ENGINES = "engines"
"""The kind of the ledger's notes about engines that were added or removed."""


class Controller:
    """The controller of one life of a run (from one start or resumption to its end): it owns the loops and drives them
    from the first publication of weights to the summary."""

    def __init__(
        self,
        parts: Components,
        settings: ControlSettings,
        *,
        ledger: Ledger,
        writer: LedgerWriter,
        observers: Observers,
    ) -> None:
        """Build the loops over the components ``parts``. ``ledger`` is read to resume the run; ``writer`` appends to
        the same ledger. ``observers`` receive steps, events and the trace."""
        run, config = settings.run, settings.flow
        columns = ColumnFiles(parts.run_dir / COLUMNS, config.columns)
        flow = Flow(
            config, writer=writer, clock=parts.clock, last_step=run.steps, pick_row=self._pick_row, columns=columns
        )  # fmt: skip
        self._order = settings.order
        contracts = (RolloutLoop.contract, ScoringLoop.contract, LearningLoop.contract, SyncLoop.contract)
        self.state = RunState(
            parts=parts,
            run=run,
            flow=flow,
            board=ActivityBoard(contracts, parts.clock),
            observers=observers,
            metrics=RunMetrics(parts, flow, num_steps=run.steps, env_column=settings.env_column),
            curriculum=settings.curriculum,
        )
        observers.add_span_source(self.state.metrics.attempts.spans)
        self._ledger = ledger
        self._writer = writer
        finished: FinishedEpisodes = asyncio.Queue(maxsize=2 * config.groups_per_step * config.group_size)
        self._fingerprint = settings.fingerprint
        self._largest_gap = settings.largest_gap
        self._saver = Saver(self.state, fingerprint=settings.fingerprint)
        self._sync = SyncLoop(self.state)
        self._scoring = ScoringLoop(self.state, finished)
        self._rollout = RolloutLoop(self.state, finished, self._scoring.turn_ended, self._scoring.tokens_arrived)
        self._learning = LearningLoop(self.state, self._sync, self._saver, has_teachers=settings.has_teachers)
        self._evaluator = Evaluator(
            parts,
            samples=run.eval_samples,
            temperature=run.eval_temperature,
            run_seed=run.seed,
            trainer=partial(trainer_state, self.state),
        )
        self._eval_after: float | None = None
        self._evaluated: dict[int, float] = {}
        """The mean reward on the held-out tasks, by version; of the last version that was evaluated."""

    def _pick_row(self, number: int) -> int | None:
        """Return the index of the dataset row that the group ``number`` attempts, by the curriculum if there is one;
        ``None`` if the rows are used up. The flow calls this for each new group."""
        curriculum = self.state.curriculum
        return self._order(number) if curriculum is None else curriculum.pick(number, self.state.flow.state.version)

    def live(self) -> LiveState:
        """Return the present state of the run, for a view that shows it."""
        state = self.state
        return state.metrics.live(phase=state.phase, waits=state.board.table(), warnings=state.warnings)

    def stop(self, by: str = "") -> None:
        """Ask the run to stop as soon as the steps that are already ordered are done, with a checkpoint from which it
        can resume. ``by`` is the signal that was received; empty for any other reason."""
        self.state.request_stop(by)

    async def run(self, start: StartingPoint) -> Summary:
        """Run from ``start`` to the last step, under the stall watchdog, and return the summary. If this raises,
        :meth:`summary` returns what was reached."""
        async with asyncio.TaskGroup() as group:
            parts, timeout_s = self.state.parts, self.state.run.stall_timeout_s
            watchdog = group.create_task(
                self.state.board.watch(timeout_s, pulse=parts.num_steps, standstills=parts.standstills)
            )
            try:
                summary = await self._run(start)
            finally:
                self.state.observers.flush()
            watchdog.cancel()
        return summary

    async def _run(self, start: StartingPoint) -> Summary:
        """Restore the state of the starting point, publish the first weights, train until the run ends, and return its
        summary."""
        state = self.state
        self._note("start", f"step {start.step}")
        if start.fingerprint not in ("", self._fingerprint):
            state.warn("settings or rows differ from those the run was begun with: it continues with the new ones")
        memory = start.memory
        state.metrics.resumed(start.step, eval_before=memory.eval_before, reward_first=memory.reward_first)
        self._sync.earlier_checksums = restore_flow(state, self._ledger, start)
        self._scoring.restore_pivots(self._ledger, start.step)
        if start.snapshot is not None:
            self._saver.mark_saved(start.step)
        await self._publish_first(start.step)
        async with asyncio.TaskGroup() as group:
            syncing = group.create_task(
                self._sync.run()
            )  # engines may join at any time, so this loop runs from the start
            cause = await self._evaluate_and_train(start)
            syncing.cancel()
        status = "finished" if cause or state.metrics.totals.steps_done >= state.run.steps else "stopped"
        state.flow.running_turns.record_all()
        self._note("end", status)
        with state.board.requesting("learner", "the last entries of the ledger", provider="the disk"):
            await state.flow.flush()
        return self.summary(status, cause)

    async def _evaluate_and_train(self, start: StartingPoint) -> str:
        """Compare engine and learner, evaluate, train to the last step, and evaluate again. Return why the run ended
        before its last step; empty if it did not, or was asked to stop."""
        state = self.state
        await self._probe(start.step)
        if start.memory.eval_before is None:
            state.metrics.totals.eval_before = await self._evaluate("evaluating before training")
        await self._train()
        cause = self._rows_used_up()
        if not state.stop_requested:
            self._eval_after = await self._evaluate("evaluating after training")
        return cause

    def _rows_used_up(self) -> str:
        """Warn if the dataset's rows did not last for all steps, and return the text of the warning; empty if they
        did."""
        state, flow = self.state, self.state.flow.state
        steps_done = state.metrics.totals.steps_done
        if state.stop_requested or not state.flow.used_up or steps_done >= state.run.steps:
            return ""
        left = len(flow.ready)
        cause = (
            f"data.epochs is used up after {steps_done} of {state.run.steps} steps: {flow.num_submitted} "
            f"groups were attempted, {sum(flow.dropped.values())} of them dropped, and {left} are left, fewer than a "
            f"batch of {state.flow_config.groups_per_step}; raise data.epochs and --resume to continue"
        )
        state.warn(cause)
        return cause

    def summary(self, status: str, cause: str = "") -> Summary:
        """Return the summary of the run so far. ``status`` is ``finished``, ``stopped`` or ``failed``; ``cause`` is why
        it failed or finished early, empty otherwise."""
        state = self.state
        return state.metrics.summary(
            self._ledger.conservation(),
            status=status,
            cause=cause,
            stopped_by=state.stopped_by if status == "stopped" else "",
            eval_after=self._eval_after,
            warnings=state.warnings,
        )

    async def _publish_first(self, version: int) -> None:
        """Publish the weights that the run starts with as ``version``, and wait until the engines have committed
        them."""
        self.state.phase = "publishing the first weights"
        self.state.board.working("sync", f"version {version}")
        publication = await self.state.parts.learner.snapshot(version, await self._sync.free_slot())
        await self._sync.deliver(publication)
        self.state.metrics.first_weights_committed()

    async def _probe(self, version: int) -> None:
        """Compare the logprobs of engine and learner at equal weights, those of ``version``, and record the gap. Raises
        :class:`~headrace.base.errors.RunError` for a gap that rounding does not explain."""
        state = self.state
        state.phase = "comparing engine and learner"
        with state.board.requesting("rollout", "a comparison of logprobs", provider="engine, learner"):
            mismatch = await measure_mismatch(state.parts, state.board, version=version, run_seed=state.run.seed)
        if mismatch is None:
            return
        state.metrics.compared(mismatch.gap)
        state.event(mismatch.text)
        allowed, explained = state.run.max_start_gap, self._largest_gap
        refuse_unexplained(mismatch, explained if allowed is None else allowed)
        if not mismatch.gap.within(explained):
            state.warn(
                f"{mismatch.text}: rounding explains {explained:.2g}, and run.max_start_gap={allowed} lets it pass; "
                "every ratio of the loss is off by that much"
            )

    async def _evaluate(self, phase: str) -> float | None:
        """Return the mean reward on the held-out tasks; ``None`` if there are none, or if the run is to stop. ``phase``
        is what views show meanwhile. A version that was the last to be evaluated is not evaluated again."""
        state = self.state
        version = state.flow.state.version
        if version in self._evaluated:
            return self._evaluated[version]
        state.phase = phase
        with state.board.requesting("rollout", "answers to the held-out tasks", provider="engine, scoring workers"):
            reward = await self._unless_stopped(self._evaluator.mean_reward(self._count_eval, state.warn))
        if reward is not None:
            self._evaluated = {version: reward}
            state.metrics.evaluated(version, reward, training=state.phase == "training")
            state.event(f"held-out mean reward {reward:.3f} at version {version}")
        return reward

    async def _unless_stopped(self, work: Coroutine[Any, Any, T | None]) -> T | None:
        """Return the result of ``work``; ``None`` if the run is asked to stop before it is done, which cancels it."""
        async with asyncio.TaskGroup() as group:
            stopped = group.create_task(self.state.stopping.wait())
            working = group.create_task(work)
            await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            working.cancel()  # does nothing if it is done
        return None if working.cancelled() else working.result()

    def _count_eval(self, tokens: int) -> None:
        """Note ``tokens`` that arrived for an evaluation, so that the watchdog sees progress. During training they are
        counted apart from the tokens for training."""
        self.state.board.progress()
        if self.state.phase == "training":
            self.state.metrics.eval_sampled(tokens)

    async def _train(self) -> None:
        """Run the rollout, scoring and learner loops until the learner has made its last step. The sync loop runs
        already."""
        state = self.state
        state.phase = "training"
        state.metrics.training_began()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in (self._rollout.run(), self._scoring.run())]
                if state.run.eval_every:
                    tasks.append(group.create_task(self._evaluate_periodically()))
                await self._learning.run()
                for task in tasks:
                    task.cancel()
        finally:
            state.metrics.training_ended()

    async def _evaluate_periodically(self) -> None:
        """Evaluate every ``run.eval_every`` steps, until cancelled. Generation for training and commits continue in the
        meantime; an evaluation is reported for the version that was committed at its start."""
        state = self.state
        due = state.flow.state.version + state.run.eval_every
        while True:
            while state.flow.state.version < due:
                await state.flow.changed.wait()
            due = state.flow.state.version + state.run.eval_every
            await self._evaluate("training")

    def record_recovery(self, recovery: Recovery) -> None:
        """Record a recovery of a part of the run: that it has died and is started again or, if the recovery has a
        duration, that it serves again."""
        state = self.state
        state.board.progress()
        if recovery.seconds is None:
            self._note(RECOVERY, str(recovery))
            state.observers.event(Event(wall_s=state.metrics.wall_s, text=str(recovery), level="warning"))
            return
        state.event(str(recovery))
        state.metrics.recovered(recovery)

    def record_engine_change(self, text: str) -> None:
        """Record that engines were added or removed while the run goes on; ``text`` says which."""
        self.state.board.progress()
        self._note(ENGINES, text)
        self.state.event(text)

    def _note(self, kind: str, detail: str) -> None:
        """Write a note about an event of the run into the ledger. ``kind`` is one word, ``detail`` the event in
        words."""
        self._writer.write(Note(kind=kind, detail=detail, at_s=self.state.parts.clock.wall()))
