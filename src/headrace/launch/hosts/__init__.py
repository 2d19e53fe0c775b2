"""The code that runs inside each process of a run: its loop, one file per role."""

EXIT_REPORTED = 86
"""Exit code of a process that has reported why it could not continue; unlikely to be used by anything else."""

EXIT_RANK_LOST = 87
"""Exit code of a rank of the learner that could not continue because another rank had ended; that other rank has the
cause."""
