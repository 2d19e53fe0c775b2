"""The snapshots of a run: one directory for each, which gets its final name only when it is complete."""

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
