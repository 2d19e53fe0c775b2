"""Snapshots of a run, one directory each, which is either complete or absent."""

from headrace.learner.checkpoint.snapshot import (
    SnapshotState,
    abandon,
    begin,
    commit,
    latest,
    newest_weights,
    read_state,
    retain,
    sweep,
)

__all__ = ["SnapshotState", "abandon", "begin", "commit", "latest", "newest_weights", "read_state", "retain", "sweep"]
