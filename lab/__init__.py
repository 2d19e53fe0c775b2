"""Experiments of the developers that are not part of the wheel: modified inputs, and killed processes.

    python -m lab fuzz [--runs N] [--seed S] [--json]      a million modified inputs of every format and endpoint
    python -m lab faults [--runs N] [--seed S] [--json]    runs whose parts are killed at random moments and resumed
    python -m lab paired --python PYTHON [--package P]     the benchmarks of another checkout beside those of this one

Users measure with ``headrace bench``.
"""
