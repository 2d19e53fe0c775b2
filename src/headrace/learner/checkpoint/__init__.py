"""Snapshots of a run: one directory each, whole or not there."""

from headrace.learner.checkpoint.snapshot import (
    SnapshotState,
    abandon,
    begin,
    commit,
    latest,
    read_state,
    retain,
    sweep,
)

__all__ = ["SnapshotState", "abandon", "begin", "commit", "latest", "read_state", "retain", "sweep"]
