"""The controller: the same code drives fakes in a test, processes on one machine, a cluster, and a simulation.

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

The length of every queue is limited by the flow's slots. Weights are published before the first rollout. The slots of a
step's groups are freed only when the version that the step made is committed. The watchdog prints the table above when
the run makes no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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
from headrace.control.state import RunState, make_trainer_state
from headrace.flow import Flow
from headrace.flow.columns import ColumnFiles
from headrace.flow.ledger import Ledger, LedgerWriter
from headrace.flow.ledger.base import Note
from headrace.flow.ready import ReadyColumns

T = TypeVar("T")

RECOVERY = "recovery"
"""The kind of the ledger's notes about parts of the run that died and were restarted."""
ENGINES = "engines"
"""The kind of the ledger's notes about engines that were added, removed or lost."""


class Controller:
    """The controller of one life of a run (from one start or resumption to its end). It owns the loops and runs them
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
        """Create the loops. ``parts`` are the components that they use. ``ledger`` is read to resume the run, and
        ``writer`` appends to the same ledger. ``observers`` receive steps, events and the trace."""
        run, config = settings.run, settings.flow
        flow = _make_flow(parts, settings, writer, self._pick_row)
        self._order = settings.order
        """The function that returns the dataset row of a group if there is no curriculum."""
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
        observers.add_span_source(self.state.metrics.attempts.pop_spans)
        self._ledger = ledger
        self._writer = writer
        finished: FinishedEpisodes = asyncio.Queue(maxsize=2 * config.groups_per_step * config.group_size)
        self._fingerprint = settings.fingerprint
        self._largest_gap = settings.largest_gap
        """The largest mean gap between the logprobs of engine and learner that rounding explains, in nats."""
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
            trainer=partial(make_trainer_state, self.state),
        )
        self._eval_after: float | None = None
        """The mean reward on the held-out tasks after training; ``None`` if it was not evaluated."""
        self._evaluated: dict[int, float] = {}
        """The mean reward on the held-out tasks by version; it contains only the last version that was evaluated."""

    def _pick_row(self, number: int) -> int | None:
        """Return the index of the dataset row that the new group ``number`` attempts: the choice of the curriculum if
        there is one, otherwise the next row in order. ``None`` if no rows are left. The flow calls this."""
        curriculum = self.state.curriculum
        return self._order(number) if curriculum is None else curriculum.pick(number, self.state.flow.state.version)

    def live(self) -> LiveState:
        """Return the current state of the run for the live view."""
        state = self.state
        return state.metrics.live(phase=state.phase, waits=state.board.table(), warnings=state.warnings)

    def stop(self, signal_name: str = "") -> None:
        """Request the run to stop when the steps that are already ordered are done, with a checkpoint from which it can
        resume. ``signal_name`` is the name of the signal that was received; empty for any other reason."""
        self.state.request_stop(signal_name)

    async def run(self, start: StartingPoint) -> Summary:
        """Run from ``start`` to the last step, watched by the stall watchdog, and return the summary. If this raises,
        :meth:`summary` returns the figures of the run so far."""
        async with asyncio.TaskGroup() as group:
            parts, timeout_s = self.state.parts, self.state.run.stall_timeout_s
            watchdog = group.create_task(
                self.state.board.watch(timeout_s, pulse=parts.num_steps, standstills=parts.standstills)
            )
            try:
                summary = await self._run(start)
            finally:
                self.state.observers.flush()
                self.state.flow.close()
            watchdog.cancel()
        return summary

    async def _run(self, start: StartingPoint) -> Summary:
        """Restore the state of the starting point ``start``, publish the first weights, train until the run ends, and
        return its summary."""
        state = self.state
        self._note("start", f"step {start.step}")
        if start.fingerprint not in ("", self._fingerprint):
            state.warn("settings or rows differ from those the run was begun with: it continues with the new ones")
        memory = start.memory
        state.metrics.run_resumed(start.step, eval_before=memory.eval_before, reward_first=memory.reward_first)
        self._sync.earlier_checksums = restore_flow(state, self._ledger, start)
        self._scoring.restore_pivots(self._ledger, start.step)
        if start.snapshot is not None:
            self._saver.mark_saved(start.step)
        await self._publish_first(start.step)
        async with asyncio.TaskGroup() as group:
            # engines may join at any time, so this loop runs from the start
            syncing = group.create_task(self._sync.run())
            cause = await self._evaluate_and_train(start)
            syncing.cancel()
        status = "finished" if cause or state.metrics.totals.steps_done >= state.run.steps else "stopped"
        state.flow.running_turns.record_all()
        self._note("end", status)
        with state.board.requesting("learner", "the last entries of the ledger", provider="the disk"):
            await state.flow.flush()
        return self.summary(status, cause)

    async def _evaluate_and_train(self, start: StartingPoint) -> str:
        """Compare engine and learner, evaluate, train from ``start`` to the last step, and evaluate again. Return the
        reason why the run ended before its last step; empty if it reached the last step or was requested to stop."""
        state = self.state
        await self._compare_engine_and_learner(start.step)
        if start.memory.eval_before is None:
            state.metrics.totals.eval_before = await self._evaluate("evaluating before training")
        await self._train()
        cause = self._warn_if_rows_used_up()
        if not state.stop_requested:
            self._eval_after = await self._evaluate("evaluating after training")
        return cause

    def _warn_if_rows_used_up(self) -> str:
        """Warn if the dataset had too few rows for all steps, and return the text of the warning; empty if it had
        enough."""
        state, flow = self.state, self.state.flow.state
        steps_done = state.metrics.totals.steps_done
        if state.stop_requested or not state.flow.used_up or steps_done >= state.run.steps:
            return ""
        ready = len(flow.ready)
        cause = (
            f"data.epochs is used up after {steps_done} of {state.run.steps} steps: {flow.num_submitted} "
            f"groups were attempted, {sum(flow.dropped.values())} of them dropped, and {ready} are left, fewer than a "
            f"batch of {state.flow_config.groups_per_step}; raise data.epochs and --resume to continue"
        )
        state.warn(cause)
        return cause

    def summary(self, status: str, cause: str = "") -> Summary:
        """Return the summary of the run so far. ``status`` is ``finished``, ``stopped`` or ``failed``; ``cause`` is the
        reason why the run failed or finished early, otherwise empty."""
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
        """Publish the initial weights of the run as ``version``, and wait until the engines have committed them."""
        self.state.phase = "publishing the first weights"
        self.state.board.set_working("sync", f"version {version}")
        publication = await self.state.parts.learner.snapshot(version, await self._sync.free_slot())
        await self._sync.deliver(publication)
        self.state.metrics.first_weights_committed()

    async def _compare_engine_and_learner(self, version: int) -> None:
        """Compare the logprobs of engine and learner at equal weights (``version``), and record the gap. Raises
        :class:`~headrace.base.errors.RunError` if the gap is larger than rounding explains."""
        state = self.state
        state.phase = "comparing engine and learner"
        with state.board.requesting("rollout", "a comparison of logprobs", provider="engine, learner"):
            mismatch = await measure_mismatch(state.parts, state.board, version=version, run_seed=state.run.seed)
        if mismatch is None:
            return
        state.metrics.gap_measured(mismatch.gap)
        state.event(mismatch.text)
        allowed, explained = state.run.max_start_gap, self._largest_gap
        refuse_unexplained(mismatch, explained if allowed is None else allowed)
        if not mismatch.gap.within(explained):
            state.warn(
                f"{mismatch.text}: rounding explains {explained:.2g}, and run.max_start_gap={allowed} lets it pass; "
                "every ratio of the loss is off by that much"
            )

    async def _evaluate(self, phase: str) -> float | None:
        """Evaluate the committed version on the held-out tasks and return the mean reward; ``None`` if there are no
        tasks, or if the run is requested to stop. ``phase`` is the phase that views show meanwhile. If the last
        evaluation was of the same version, return its result."""
        state = self.state
        version = state.flow.state.version
        if version in self._evaluated:
            return self._evaluated[version]
        state.phase = phase
        with state.board.requesting("rollout", "answers to the held-out tasks", provider="engine, scoring workers"):
            reward = await self._run_unless_stopped(self._evaluator.mean_reward(self._count_eval_tokens, state.warn))
        if reward is not None:
            self._evaluated = {version: reward}
            state.metrics.evaluation_ended(version, reward, training=state.phase == "training")
            state.event(f"held-out mean reward {reward:.3f} at version {version}")
        return reward

    async def _run_unless_stopped(self, work: Coroutine[Any, Any, T | None]) -> T | None:
        """Return the result of ``work``. If the run is requested to stop earlier, cancel ``work`` and return
        ``None``."""
        async with asyncio.TaskGroup() as group:
            stop_wait = group.create_task(self.state.stopping.wait())
            task = group.create_task(work)
            await asyncio.wait({stop_wait, task}, return_when=asyncio.FIRST_COMPLETED)
            stop_wait.cancel()
            task.cancel()  # no effect if it is done
        return None if task.cancelled() else task.result()

    def _count_eval_tokens(self, tokens: int) -> None:
        """Record that ``tokens`` tokens of an evaluation have arrived: report progress to the watchdog and, during
        training, count them separately from the tokens for training."""
        self.state.board.record_progress()
        if self.state.phase == "training":
            self.state.metrics.eval_sampled(tokens)

    async def _train(self) -> None:
        """Run the rollout, scoring and learner loops until the learner loop ends. The sync loop is already running."""
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
        """Evaluate every ``run.eval_every`` steps, until cancelled. Training continues in the meantime. An evaluation
        is reported for the version that was committed when it began."""
        state = self.state
        next_version = state.flow.state.version + state.run.eval_every
        while True:
            while state.flow.state.version < next_version:
                await state.flow.changed.wait()
            next_version = state.flow.state.version + state.run.eval_every
            await self._evaluate("training")

    def record_recovery(self, recovery: Recovery) -> None:
        """Record that a part of the run has died and is being restarted or, if ``recovery`` has a duration, that it is
        available again."""
        state = self.state
        state.board.record_progress()
        if recovery.seconds is None:
            self._note(RECOVERY, str(recovery))
            state.observers.event(Event(wall_s=state.metrics.wall_s, text=str(recovery), level="warning"))
            return
        state.event(str(recovery))
        state.metrics.part_recovered(recovery)

    def record_engine_change(self, text: str, *, changed: bool = True, lost: bool = False) -> None:
        """Record what became of an engine while the run goes on; ``text`` says which. An engine that was not added
        (``changed`` is false) leaves no note, since the run is as it was, and can be replayed. Each loss of an engine
        (``lost``) is a warning, whose kind is the text before the comma, such as ``engine-1 is lost``."""
        self.state.board.record_progress()
        if changed:
            self._note(ENGINES, text)
        if lost:
            self.state.warn(text, kind=text.partition(",")[0], always=True)
        else:
            self.state.event(text)

    def _note(self, kind: str, detail: str) -> None:
        """Write a note about an event of the run to the ledger. ``kind`` is one word, ``detail`` a description of the
        event."""
        self._writer.write(Note(kind=kind, detail=detail, at_s=self.state.parts.clock.wall()))


def _make_flow(
    parts: Components, settings: ControlSettings, writer: LedgerWriter, pick_row: Callable[[int], int | None]
) -> Flow:
    """Return the flow of a run with the ``settings``, and with the files of its store, which are in the run directory
    of ``parts``. ``writer`` appends to the ledger, and ``pick_row`` returns the row of a new group."""
    store, columns = parts.run_dir / COLUMNS, settings.flow.columns
    return Flow(
        settings.flow,
        writer=writer,
        clock=parts.clock,
        last_step=settings.run.steps,
        pick_row=pick_row,
        columns=ColumnFiles(store, columns),
        ready=ReadyColumns(store, limit_bytes=columns.limit_bytes) if parts.columns_shared else None,
    )
