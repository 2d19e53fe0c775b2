"""What runs inside each process of a run: its loop, one file per role."""

SPOKE = 1
"""Exit code of a process that has said why it could not go on."""
