"""How a run goes on after it ended, however it ended.

The newest snapshot says which step the weights have behind them. The ledger is rolled back to it: groups of later
steps are ready again and remember their step, so the same batches are trained again in the same order and give the same
weights; groups that were running keep the episodes that had ended, and the rest is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from headrace.base.errors import CheckpointError, ConfigError
from headrace.base.types.group import GroupState
from headrace.control.memory import ControllerMemory
from headrace.control.saving import CHECKPOINTS
from headrace.control.state import RunState
from headrace.flow.ledger import Ledger
from headrace.flow.policies.deadlines import age_needed
from headrace.learner import checkpoint
from headrace.rollout.environments.curriculum import CurriculumState


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """What a life of a run begins from."""

    step: int
    """Optimizer steps that the weights have behind them; also their version."""
    snapshot: Path | None
    """Where the weights are; ``None``: the model directory of the run file."""
    fingerprint: str = ""
    """Of the settings and rows that the snapshot was made with."""
    memory: ControllerMemory = field(default_factory=ControllerMemory)
    """What the controller remembered."""
    sealed: bool = True
    """Whether the files of the snapshot had checksums to be compared with."""


def starting_point(run_dir: Path) -> StartingPoint:
    """Where the run in ``run_dir`` can go on; step 0 where it has no snapshot yet.

    Every file of the newest snapshot is compared with its checksum. Raises
    :class:`~headrace.base.errors.CheckpointError` where one is missing or has changed: an older snapshot is offered
    there, and never taken without a word.
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
    """Put the groups back where the ledger remembers them; returns the hashes of versions committed before."""
    recalled = ledger.recall(start.step)
    if start.step * state.flow_config.groups_per_step != recalled.num_released:
        raise CheckpointError(
            f"the snapshot is of step {start.step}, but the ledger knows {recalled.num_released} trained groups before "
            f"it (flow.groups_per_step={state.flow_config.groups_per_step})",
            remedy="restore ledger and checkpoints from the same moment, or start a new run directory",
        )
    config = state.flow_config
    state.flow.restore(start.step, recalled)
    if state.curriculum is not None:
        known = start.memory.curriculum or CurriculumState()
        state.curriculum.restore(known, ledger.attempts(known.first_unknown))
    if config.max_age == "auto":
        state.flow.resume_max_age(start.memory.max_age)
    needed = age_needed(state.flow.state, only_planned=config.policy.drops_stale)
    if needed > config.greatest_age and not config.policy.masks_stale:
        raise ConfigError(
            f"flow.max_age={config.greatest_age} is too little to go on with the run: it holds groups that would "
            f"be trained at an age of {needed} versions",
            remedy=f"set flow.max_age >= {needed}, or start a new run directory",
        )
    ready = sum(group.state is GroupState.READY for group in recalled.groups)
    if recalled.num_submitted:
        state.event(
            f"resumed at step {start.step}: {ready} groups are ready, {len(recalled.groups) - ready} more go on"
        )
    return recalled.checksums
