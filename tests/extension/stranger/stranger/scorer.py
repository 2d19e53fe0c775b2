"""A component of the reward."""

from __future__ import annotations

from typing import Literal

from headrace.extend import RewardSection
from headrace.rollout.scoring.grading import BlockingGrader


class SmallDigits(RewardSection):
    """The share of digits below ``limit``."""

    kind: Literal["small_digits"] = "small_digits"
    """Selects this reward."""
    limit: int = 5
    """Digits below it count."""

    def grader(self, executor):
        """Count."""
        return BlockingGrader(self.grade, executor)

    def grade(self, request):
        """Between 0 and 1."""
        text = request.completions[0]
        return sum(character.isdigit() and int(character) < self.limit for character in text) / max(1, len(text))
