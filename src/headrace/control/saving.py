"""Snapshots (checkpoints) of a run: the state of the controller that they contain in addition to the learner's files,
and the order in which both are written. A *life* of a run is the time from one start or resumption to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import off_loop
from headrace.base.errors import CheckpointError
from headrace.control.state import RunState
from headrace.flow.columns import remove
from headrace.learner import checkpoint
from headrace.learner.checkpoint import SnapshotState
from headrace.rollout.environments.curriculum import CurriculumState

CHECKPOINTS = "checkpoints"
"""Name of the folder in a run's directory that contains its snapshots."""


class ControllerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the controller in a snapshot, which a later life of the run needs in addition to the weights and the
    ledger."""

    eval_before: float | None = None
    """The held-out mean reward before the first step of the run; ``None`` if there was no evaluation."""
    reward_first: float | None = None
    """The mean reward of the run's first batch; ``None`` before that batch."""
    max_age: int | None = None
    """The staleness bound at the time of the snapshot, in versions; ``None`` for a new run."""
    curriculum: CurriculumState | None = None
    """The curriculum's statistics of the rows; ``None`` without a curriculum."""

    def as_json(self) -> dict[str, Any]:
        """Return the state as values that can be written as JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> ControllerMemory:
        """Return the state from ``plain``, a value that :meth:`as_json` returned. Raises
        :class:`~headrace.base.errors.CheckpointError` if the values are not valid."""
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"the controller's part of a snapshot cannot be read: {error}",
                remedy="resume from an older snapshot beside it, or copy this one again, whole",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A snapshot that was requested and is not complete yet."""

    step: int
    """Number of optimizer steps behind the snapshot's weights."""
    unfinished: Path
    """The directory of the snapshot, under its temporary name."""
    written: asyncio.Task[None]
    """The task that ends when the learner can continue to train: it has copied its state, or has written its files."""


class Saver:
    """The writer of a run's snapshots. For each snapshot it writes the learner's files, then the controller's state,
    and then gives the snapshot its final name. Generation continues meanwhile, and training continues as soon as the
    learner has copied its state."""

    def __init__(self, state: RunState, *, fingerprint: str) -> None:
        """Create the writer. ``state`` is the state of the run. ``fingerprint`` is a hash of the settings and dataset
        rows, which is stored in every snapshot."""
        self._state = state
        self._fingerprint = fingerprint
        self._saved: set[int] = set()
        """The steps whose snapshots exist."""
        self.directory = state.parts.run_dir / CHECKPOINTS
        """The directory in which the snapshots are written."""

    def mark_saved(self, step: int) -> None:
        """Record that the snapshot of ``step`` exists, because the run has resumed from it, so that it is not written
        again."""
        self._saved.add(step)

    def begin(self, step: int, tasks: asyncio.TaskGroup) -> Saving:
        """Request the snapshot of ``step`` from the learner, in a task of the group ``tasks``. The learner makes it
        after all earlier requests. Return the unfinished snapshot, which is passed to :meth:`wait_until_copied` and
        :meth:`complete`."""
        unfinished = checkpoint.begin(self.directory, step)
        written = tasks.create_task(self._state.parts.learner.save(unfinished))
        return Saving(step=step, unfinished=unfinished, written=written)

    async def wait_until_copied(self, saving: Saving) -> ControllerMemory:
        """Wait until the learner has copied its state for ``saving`` and can continue to train, and return the
        controller's state for the snapshot, which is passed to :meth:`complete`.

        Raises :class:`~headrace.base.errors.CheckpointError` if the snapshot cannot be written; its files are then
        deleted.
        """
        state = self._state
        state.board.set_working("learner", f"snapshot of step {saving.step}")
        start_s = state.parts.clock.now()
        try:
            with state.board.requesting("learner", f"the snapshot of step {saving.step}", provider="the learner"):
                await saving.written
        except BaseException:
            checkpoint.abandon(saving.unfinished)
            raise
        state.metrics.snapshot_saved(state.parts.clock.now() - start_s)
        # read before the flush, so that the ledger contains everything that this state refers to
        return self._make_memory()

    async def complete(self, saving: Saving, memory: ControllerMemory) -> None:
        """Wait for the learner's files of ``saving``, write ``memory``, the controller's state, and give the snapshot
        its final name. Training continues meanwhile, so the ledger may also contain later steps, which are rolled back
        when the run resumes from the snapshot.

        Raises :class:`~headrace.base.errors.CheckpointError` if the snapshot cannot be written; its files are then
        deleted.
        """
        state = self._state
        try:
            with state.board.requesting("learner", f"the files of step {saving.step}", provider="the learner"):
                await state.parts.learner.wait_until_saved(saving.unfinished)
            with state.board.requesting("learner", "a ledger that is safe on disk", provider="the disk"):
                if state.flow.columns is not None:
                    await off_loop(state.flow.columns.sync)  # the ledger refers to the contents of these files
                await state.flow.flush(durable=True)  # the ledger must contain every step of the snapshot
        except BaseException:
            checkpoint.abandon(saving.unfinished)
            raise
        snapshot_state = SnapshotState(
            step=saving.step, version=saving.step, config_fingerprint=self._fingerprint, controller=memory.as_json()
        )
        final = await off_loop(checkpoint.commit, saving.unfinished, snapshot_state)
        self._saved.add(saving.step)
        await off_loop(checkpoint.retain, self.directory, state.run.keep_checkpoints)
        if state.flow.columns is not None:
            await off_loop(remove, state.flow.columns.take_unneeded(saving.step))
        state.event(f"checkpoint {final.name}")

    def _make_memory(self) -> ControllerMemory:
        """Return the current state of the controller for a snapshot."""
        state = self._state
        return ControllerMemory(
            eval_before=state.metrics.totals.eval_before,
            reward_first=state.metrics.totals.reward_first,
            max_age=state.flow.state.limits.max_age,
            curriculum=None if state.curriculum is None else state.curriculum.state(),
        )

    async def save_if_new(self, step: int) -> None:
        """Write the snapshot of ``step``, unless this life of the run has written it or resumed from it."""
        if step not in self._saved:
            async with asyncio.TaskGroup() as tasks:
                saving = self.begin(step, tasks)
                await self.complete(saving, await self.wait_until_copied(saving))
