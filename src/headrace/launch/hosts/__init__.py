"""What runs inside each process of a run: its loop, one file per role."""
