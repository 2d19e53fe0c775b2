"""Snapshots of a run, at the controller's side."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from headrace.base.clock import off_loop
from headrace.control.memory import ControllerMemory
from headrace.control.state import RunState
from headrace.learner import checkpoint
from headrace.learner.checkpoint import SnapshotState

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A snapshot that is being written."""

    step: int
    unfinished: Path
    """Its directory, under a temporary name."""
    written: asyncio.Task[None]
    """Done when the learner's files are there."""


class Saver:
    """Writes snapshots: the learner its files, then the state and the name. Generation goes on meanwhile."""

    def __init__(self, state: RunState, *, fingerprint: str) -> None:
        self._state = state
        self._fingerprint = fingerprint
        self._saved: set[int] = set()
        self.directory = state.parts.run_dir / CHECKPOINTS

    def began_from(self, step: int) -> None:
        """The run resumes from the snapshot of ``step``: there is no need to write it again."""
        self._saved.add(step)

    def begin(self, step: int, orders: asyncio.TaskGroup) -> Saving:
        """Order the snapshot of ``step``: the learner writes when it comes to it."""
        unfinished = checkpoint.begin(self.directory, step)
        written = orders.create_task(self._state.parts.learner.save(unfinished))
        return Saving(step=step, unfinished=unfinished, written=written)

    async def finish(self, saving: Saving) -> None:
        """Wait for the learner's files, add the state and give the snapshot its name.

        :class:`~headrace.base.errors.CheckpointError` if it cannot be written; none is left then.
        """
        state = self._state
        state.board.working("learner", f"snapshot of step {saving.step}")
        start_s = state.parts.clock.now()
        try:
            with state.board.asking("learner", f"the snapshot of step {saving.step}", of="the learner"):
                await saving.written
            state.tally.learner_busy_s += state.parts.clock.now() - start_s
            memory = self._memory()  # the ledger below knows of all that it holds
            with state.board.asking("learner", "a ledger that is safe on disk", of="the disk"):
                await state.flow.flush(durable=True)  # it must know of every step that the snapshot contains
        except BaseException:
            checkpoint.abandon(saving.unfinished)
            raise
        snapshot_state = SnapshotState(
            step=saving.step,
            version=saving.step,
            config_fingerprint=self._fingerprint,
            controller=memory.as_json(),
        )
        final = await off_loop(checkpoint.commit, saving.unfinished, snapshot_state)
        self._saved.add(saving.step)
        await off_loop(checkpoint.retain, self.directory, state.run.keep_checkpoints)
        state.event(f"checkpoint {final.name}")

    def _memory(self) -> ControllerMemory:
        state = self._state
        return ControllerMemory(
            eval_before=state.tally.eval_before,
            reward_first=state.tally.reward_first,
            max_age=state.flow.state.limits.max_age,
            curriculum=None if state.curriculum is None else state.curriculum.state(),
        )

    async def save_if_new(self, step: int) -> None:
        """A snapshot of ``step``, unless this life of the run has written it or began from it."""
        if step not in self._saved:
            async with asyncio.TaskGroup() as orders:
                await self.finish(self.begin(step, orders))
