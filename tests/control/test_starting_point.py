"""What a snapshot tells the next life of a run."""

from __future__ import annotations

from pathlib import Path

from headrace.control.recovery import StartingPoint, find_starting_point
from headrace.control.saving import CHECKPOINTS, ControllerMemory
from headrace.learner import checkpoint
from headrace.learner.checkpoint import SnapshotState


def test_run_without_a_snapshot_begins_at_step_0(tmp_path: Path) -> None:
    assert find_starting_point(tmp_path) == StartingPoint(step=0, snapshot=None)


def test_figures_that_the_first_life_began_from_outlast_it(tmp_path: Path) -> None:
    unfinished = checkpoint.begin(tmp_path / CHECKPOINTS, 4)
    told: dict[str, object] = {"eval_before": 0.25, "reward_first": 0.5}
    final = checkpoint.commit(unfinished, SnapshotState(step=4, version=4, config_fingerprint="abc", controller=told))
    assert find_starting_point(tmp_path) == StartingPoint(
        step=4, snapshot=final, fingerprint="abc", memory=ControllerMemory(eval_before=0.25, reward_first=0.5)
    )
