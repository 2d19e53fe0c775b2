"""Functions that resume a run after it ended, for whatever cause. A *life* of a run is the time from one start or
resumption to its end.

The ledger is rolled back to the step of the newest snapshot (checkpoint). Groups of this and later steps are ready
again and keep their step, so the same batches are trained again in the same order, and the same weights result. Groups
that were running keep their ended episodes; their other episodes continue from their recorded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.errors import CheckpointError, ConfigError
from headrace.base.types.group import GroupState
from headrace.control.saving import CHECKPOINTS, ControllerMemory
from headrace.control.state import RunState
from headrace.flow.ledger import Ledger
from headrace.flow.policies.deadlines import compute_needed_age
from headrace.learner import checkpoint
from headrace.rollout.environments.curriculum import CurriculumState


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """The state from which a life of a run starts: its first start, or a snapshot from which it resumes."""

    step: int
    """Number of optimizer steps behind the weights, which is also the version of the weights."""
    snapshot: Path | None
    """The directory of the snapshot with the weights; ``None``: the run starts from the model directory of the run
    file."""
    fingerprint: str = ""
    """The hash of the settings and rows with which the snapshot was made; empty without a snapshot."""
    memory: ControllerMemory = field(default_factory=ControllerMemory)
    """The state of the controller in the snapshot."""
    sealed: bool = True
    """Whether the files of the snapshot had checksums, so that they could be verified."""


def find_starting_point(run_dir: Path) -> StartingPoint:
    """Return the point from which the run in ``run_dir`` continues: its newest snapshot, or step 0 if it has no
    snapshot.

    Every file of the newest snapshot is compared with its checksum. Raises
    :class:`~headrace.base.errors.CheckpointError` if a file is missing or has changed; the remedy names an older
    snapshot, which is never used without a decision of the user.
    """
    snapshot = checkpoint.latest(run_dir / CHECKPOINTS)
    if snapshot is None:
        return StartingPoint(step=0, snapshot=None)
    state = checkpoint.read_state(snapshot)
    return StartingPoint(
        step=state.step,
        snapshot=snapshot,
        fingerprint=state.config_fingerprint,
        memory=ControllerMemory.from_json(state.controller),
        sealed=state.sealed,
    )


def restore_flow(state: RunState, ledger: Ledger, start: StartingPoint) -> dict[int, str]:
    """Roll ``ledger`` back to the starting point ``start``, and restore the groups of the flow in ``state`` from it.
    Return the hashes of the weights that an earlier life of the run committed, by version, from the version of the
    starting point on. Raises :class:`~headrace.base.errors.CheckpointError` if ledger and snapshot do not match, and
    :class:`~headrace.base.errors.ConfigError` if recorded groups would exceed the staleness bound."""
    resumed = ledger.roll_back(start.step)
    if start.step * state.flow_config.groups_per_step != resumed.num_released:
        raise CheckpointError(
            f"the snapshot is of step {start.step}, but the ledger knows {resumed.num_released} trained groups before "
            f"it (flow.groups_per_step={state.flow_config.groups_per_step})",
            remedy="restore ledger and checkpoints from the same moment, or start a new run directory",
        )
    config = state.flow_config
    if why := state.flow.restore(start.step, resumed):
        state.warn(f"ready groups stay in memory until they are trained: {why}")
    if state.curriculum is not None:
        curriculum_state = start.memory.curriculum or CurriculumState()
        state.curriculum.restore(curriculum_state, ledger.attempts(curriculum_state.first_unknown))
    if config.max_age == "auto":
        state.flow.resume_max_age(start.memory.max_age)
    needed = compute_needed_age(state.flow.state, only_planned=config.policy.drops_stale)
    if needed > config.largest_age and not config.policy.masks_stale:
        raise ConfigError(
            f"flow.max_age={config.largest_age} is too little to continue the run: it holds groups that would "
            f"be trained at an age of {needed} versions",
            remedy=f"set flow.max_age >= {needed}, or start a new run directory",
        )
    ready = sum(group.state is GroupState.READY for group in resumed.groups)
    if resumed.num_submitted:
        num_unfinished = len(resumed.groups) - ready
        state.event(f"resumed at step {start.step}: {ready} groups are ready, {num_unfinished} more continue")
    return resumed.checksums
