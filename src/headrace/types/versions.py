"""Versions: the integers that name sets of weights.

Version 0 is what the run starts from; version ``n`` is what the learner holds after ``n`` optimizer steps.
"""

from __future__ import annotations

NOT_SAMPLED = -1
"""The version of a token that no policy sampled: prompts, tool results, templates."""

INITIAL = 0
"""The version of the weights that a run starts from."""
