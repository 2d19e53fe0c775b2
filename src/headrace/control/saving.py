"""Snapshots of a run, at the controller's side."""

from __future__ import annotations

from headrace import checkpoint
from headrace.checkpoint import SnapshotState
from headrace.clock import off_loop
from headrace.control.state import RunState

CHECKPOINTS = "checkpoints"


class Saver:
    """Writes snapshots: the learner its files, then the state and the name. Generation goes on meanwhile."""

    def __init__(self, state: RunState, *, fingerprint: str) -> None:
        self._state = state
        self._fingerprint = fingerprint
        self._saved: set[int] = set()
        self.directory = state.parts.run_dir / CHECKPOINTS

    def has_saved(self, step: int) -> bool:
        """Whether this life of the run has written the snapshot of ``step``, or began from it."""
        return step in self._saved

    def began_from(self, step: int) -> None:
        """The run resumes from the snapshot of ``step``: there is no need to write it again."""
        self._saved.add(step)

    async def save(self, step: int) -> None:
        """One snapshot; :class:`~headrace.errors.CheckpointError` if it cannot be written, and then none is left."""
        state = self._state
        state.board.working("learner", f"snapshot of step {step}")
        await state.flow.flush()
        unfinished = checkpoint.begin(self.directory, step)
        try:
            await state.parts.learner.save(unfinished)
        except BaseException:
            checkpoint.abandon(unfinished)
            raise
        snapshot_state = SnapshotState(
            step=step,
            version=step,
            config_fingerprint=self._fingerprint,
            controller={"seed": state.run.seed, "groups_submitted": state.flow.state.num_submitted},
        )
        final = await off_loop(checkpoint.commit, unfinished, snapshot_state)
        self._saved.add(step)
        await off_loop(checkpoint.retain, self.directory, state.run.keep_checkpoints)
        state.event(f"checkpoint {final.name}")
