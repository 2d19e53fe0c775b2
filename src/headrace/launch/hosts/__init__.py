"""The code that runs inside the processes of a run. Each role has one file."""

EXIT_REPORTED = 86
"""The exit code of a process that has reported why it could not continue. Other programs are unlikely to use it."""

EXIT_RANK_LOST = 87
"""The exit code of a rank of the learner that could not continue because another rank had ended. The other rank reports
the cause."""
