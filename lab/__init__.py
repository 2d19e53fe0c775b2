"""What the makers of Headrace try on it, and no wheel holds: inputs that were changed, parts that are killed.

    python -m lab fuzz [--runs N] [--seed S] [--json]      a million changed inputs of every format and endpoint
    python -m lab faults [--runs N] [--seed S] [--json]    runs whose parts are killed at random moments, and resumed

What a user measures is ``headrace bench``.
"""
