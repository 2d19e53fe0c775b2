"""What runs inside each process of a run: its loop, one file per role."""

SPOKE = 86
"""Exit code of a process that has said why it could not go on; one that nothing else is likely to end with."""

LOST = 87
"""Exit code of a rank of the learner that could not go on without another: a consequence, of which that one is the
cause."""
