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

from headrace.base.types.observation import Event, LiveState, Recovery
from headrace.control.attempts import Attempts
from headrace.control.board import ActivityBoard
from headrace.control.config import ControlSettings
from headrace.control.evaluation import Evaluator
from headrace.control.loops import LearningLoop, RolloutLoop, ScoringLoop, SyncLoop
from headrace.control.loops.rollout import FinishedEpisodes
from headrace.control.observer import Observers
from headrace.control.parts import Components
from headrace.control.probe import measure_mismatch, refuse_unexplained
from headrace.control.recording import live_state
from headrace.control.recovery import StartingPoint, restore_flow
from headrace.control.saving import Saver
from headrace.control.state import MAX_WARNINGS, RunState, trainer_state
from headrace.control.summary import Summary
from headrace.control.summing import summarize
from headrace.flow import Flow
from headrace.flow.ledger import Ledger, LedgerWriter
from headrace.flow.ledger.base import Note

T = TypeVar("T")

RECOVERY = "recovery"
"""The kind of the ledger's notes on parts that died and were started again."""


class Controller:
    """One run, from its first publication to its summary."""

    def __init__(
        self,
        parts: Components,
        settings: ControlSettings,
        *,
        ledger: Ledger,
        writer: LedgerWriter,
        observers: Observers,
    ) -> None:
        run, flow = settings.run, settings.flow
        self._order = settings.order
        contracts = (RolloutLoop.contract, ScoringLoop.contract, LearningLoop.contract, SyncLoop.contract)
        self.state = RunState(
            parts=parts,
            run=run,
            flow=Flow(flow, writer=writer, clock=parts.clock, last_step=run.steps, pick_row=self._pick_row),
            board=ActivityBoard(contracts, parts.clock),
            observers=observers,
            started_s=parts.clock.now(),
            attempts=Attempts(settings.env_column),
            curriculum=settings.curriculum,
        )
        observers.ask(self.state.attempts.spans)
        self._ledger = ledger
        self._writer = writer
        finished: FinishedEpisodes = asyncio.Queue(maxsize=2 * flow.groups_per_step * flow.group_size)
        self._fingerprint = settings.fingerprint
        self._largest_gap = settings.largest_gap
        self._saver = Saver(self.state, fingerprint=settings.fingerprint)
        self._sync = SyncLoop(self.state)
        self._scoring = ScoringLoop(self.state, finished)
        self._rollout = RolloutLoop(self.state, finished, self._scoring.turn_ended, self._scoring.turn_grew)
        self._learning = LearningLoop(self.state, self._sync, self._saver, taught=settings.taught)
        self._evaluator = Evaluator(
            parts,
            samples=run.eval_samples,
            temperature=run.eval_temperature,
            run_seed=run.seed,
            trainer=partial(trainer_state, self.state),
        )
        self._eval_after: float | None = None

    def _pick_row(self, number: int) -> int | None:
        curriculum = self.state.curriculum
        return self._order(number) if curriculum is None else curriculum.pick(number, self.state.flow.state.version)

    def live(self) -> LiveState:
        """The present moment, for a view."""
        return live_state(self.state)

    def stop(self, by: str = "") -> None:
        """End after the steps that are ordered, with a checkpoint that the run can resume from; ``by`` is the signal
        that asks for it."""
        self.state.ask_to_stop(by)

    async def run(self, start: StartingPoint) -> Summary:
        """The whole run, watched; :meth:`summary` tells what was reached where it raises."""
        async with asyncio.TaskGroup() as group:
            parts, timeout_s = self.state.parts, self.state.run.stall_timeout_s
            watchdog = group.create_task(self.state.board.watch(timeout_s, parts.num_steps, parts.standing))
            try:
                summary = await self._run(start)
            finally:
                self.state.observers.flush()
            watchdog.cancel()
        return summary

    async def _run(self, start: StartingPoint) -> Summary:
        state = self.state
        self._note("start", f"step {start.step}")
        if start.fingerprint not in ("", self._fingerprint):
            state.warn("settings or rows differ from those the run was begun with: it goes on with the new ones")
        state.tally.steps_done = start.step
        state.tally.eval_before, state.tally.reward_first = start.memory.eval_before, start.memory.reward_first
        self._sync.earlier_checksums = restore_flow(state, self._ledger, start)
        self._scoring.recall(self._ledger, start.step)
        if start.snapshot is not None:
            self._saver.began_from(start.step)
        await self._publish_first(start.step)
        async with asyncio.TaskGroup() as group:
            syncing = group.create_task(self._sync.run())  # engines may come at any time
            cause = await self._first_to_last(start)
            syncing.cancel()
        status = "finished" if cause or state.tally.steps_done >= state.run.steps else "stopped"
        state.flow.running_turns.record_all()
        self._note("end", status)
        with state.board.asking("learner", "the last entries of the ledger", of="the disk"):
            await state.flow.flush()
        return self.summary(status, cause)

    async def _first_to_last(self, start: StartingPoint) -> str:
        """Everything that needs an engine with weights; why it ended before the last step, if it did."""
        state = self.state
        await self._probe(start.step)
        if start.memory.eval_before is None:
            state.tally.eval_before = await self._evaluate("evaluating before training")
        await self._train()
        cause = self._rows_used_up()
        if not state.stop_asked:
            self._eval_after = await self._evaluate("evaluating after training")
        return cause

    def _rows_used_up(self) -> str:
        """What there is to say where the rows did not last for all steps; empty otherwise."""
        state, flow = self.state, self.state.flow.state
        if state.stop_asked or not state.flow.used_up or state.tally.steps_done >= state.run.steps:
            return ""
        left = len(flow.ready)
        cause = (
            f"data.epochs is used up after {state.tally.steps_done} of {state.run.steps} steps: {flow.num_submitted} "
            f"groups were attempted, {sum(flow.dropped.values())} of them dropped, and {left} are left, fewer than a "
            f"batch of {state.flow_config.groups_per_step}; raise data.epochs and --resume to go on"
        )
        state.warn(cause)
        return cause

    def summary(self, status: str, cause: str = "") -> Summary:
        """What the run came to, so far."""
        return summarize(
            self.state,
            self._ledger.conservation(),
            status=status,
            cause=cause,
            eval_after=self._eval_after,
        )

    async def _publish_first(self, version: int) -> None:
        self.state.phase = "publishing the first weights"
        self.state.board.working("sync", f"version {version}")
        publication = await self.state.parts.learner.snapshot(version, await self._sync.free_slot())
        await self._sync.bring(publication)
        self.state.tally.commit_gaps_s.clear()  # nothing was running that could have waited

    async def _probe(self, version: int) -> None:
        state = self.state
        state.phase = "comparing engine and learner"
        with state.board.asking("rollout", "a comparison of logprobs", of="engine, learner"):
            mismatch = await measure_mismatch(state.parts, state.board, version=version, run_seed=state.run.seed)
        if mismatch is None:
            return
        state.tally.mismatch_kl, state.tally.mismatch_abs = mismatch.gap.kl, mismatch.gap.mean_abs
        state.event(mismatch.text)
        allowed, explained = state.run.max_start_gap, self._largest_gap
        refuse_unexplained(mismatch, explained if allowed is None else allowed)
        if not mismatch.gap.within(explained):
            state.warn(
                f"{mismatch.text}: rounding explains {explained:.2g}, and run.max_start_gap={allowed} lets it pass; "
                "every ratio of the loss is off by that much"
            )

    async def _evaluate(self, phase: str) -> float | None:
        """The mean held-out reward; ``None`` without such tasks, or where the run was asked to stop meanwhile."""
        state = self.state
        state.phase = phase
        version = state.flow.state.version
        with state.board.asking("rollout", "answers to the held-out tasks", of="engine, scoring workers"):
            reward = await self._unless_stopped(self._evaluator.mean_reward(self._count_eval, state.warn))
        if reward is not None:
            state.tally.evals[version] = reward
            state.tally.fresh_eval = version if state.phase == "training" else None
            state.event(f"held-out mean reward {reward:.3f} at version {version}")
        return reward

    async def _unless_stopped(self, work: Coroutine[Any, Any, T | None]) -> T | None:
        """The result of ``work``; ``None`` if the run was asked to stop before it was done."""
        async with asyncio.TaskGroup() as group:
            stopped = group.create_task(self.state.stopping.wait())
            working = group.create_task(work)
            await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            working.cancel()  # does nothing if it is done
        return None if working.cancelled() else working.result()

    def _count_eval(self, tokens: int) -> None:
        self.state.board.progress()
        if self.state.phase == "training":
            self.state.tally.eval_tokens += tokens

    async def _train(self) -> None:
        """The loops, of which the sync runs already, until the learner has made its last step."""
        state = self.state
        state.phase = "training"
        state.training_from_s = state.parts.clock.now()
        state.tally.recent.clear()  # evaluation and comparison were counted otherwise
        state.engine_before = state.parts.engine.stats()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in (self._rollout.run(), self._scoring.run())]
                if state.run.eval_every:
                    tasks.append(group.create_task(self._evaluate_now_and_then()))
                await self._learning.run()
                for task in tasks:
                    task.cancel()
        finally:
            state.training_until_s = state.parts.clock.now()
            state.engine_after = state.parts.engine.stats()

    async def _evaluate_now_and_then(self) -> None:
        """Generation for training goes on meanwhile, and so do commits: the version is the one it began with."""
        state = self.state
        due = state.flow.state.version + state.run.eval_every
        while True:
            while state.flow.state.version < due:
                await state.flow.changed.wait()
            due = state.flow.state.version + state.run.eval_every
            await self._evaluate("training")

    def recovers(self, recovery: Recovery) -> None:
        """A part has died and is started again, or serves again."""
        state = self.state
        state.board.progress()
        if recovery.seconds is None:
            self._note(RECOVERY, str(recovery))
            state.observers.event(Event(wall_s=state.wall_s, text=str(recovery), level="warning"))
            return
        state.event(str(recovery))
        state.tally.recoveries = [*state.tally.recoveries, recovery][-MAX_WARNINGS:]

    def _note(self, kind: str, detail: str) -> None:
        self._writer.write(Note(kind=kind, detail=detail, at_s=self.state.parts.clock.wall()))
