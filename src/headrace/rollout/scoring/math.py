"""Rewards for mathematical answers, compared by their meaning with ``math-verify`` (the extra ``math``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Literal, Self

from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Grader, RewardSection
from headrace.rollout.scoring.grading import BlockingGrader, Unscorable, column


class MathReward(RewardSection):
    """1 if the last answer in the completion equals the expected one (``\\frac12`` and ``0.5``, sets, intervals,
    equations), 0 if it does not or if there is none.

    Answers are parsed, never evaluated as Python. Some expressions keep the algebra busy for ever: ``timeout_s`` ends
    those with their worker. Source: huggingface/Math-Verify.
    """

    kind: Literal["math"] = "math"
    """Selects this reward."""
    answer_column: str = "answer"
    """The column with the expected answer: LaTeX or plain text, or a number."""
    timeout_s: float = Field(default=10.0, gt=0)
    """The longest time of a comparison. One that takes longer fails, and its worker is replaced."""

    def columns(self) -> dict[str, str]:
        """Return the column of the expected answer, which every row must have, with the setting that names it."""
        return {self.answer_column: f"answer_column={self.answer_column!r}"}

    def check(self) -> Self:
        """Check that the package math-verify is installed, and return the section."""
        if find_spec("math_verify") is None:
            raise ConfigError(
                f"env.rewards {self.label!r} needs the package math-verify", remedy="pip install 'headrace[math]'"
            )
        return self

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return a grader that parses and compares answers."""
        return BlockingGrader(_comparison(self.answer_column), executor)


def _comparison(answer_column: str) -> Callable[[ScoreCompletions], float]:
    """Return a function that grades a completion by comparing its answer with that in ``answer_column`` as mathematics
    (``math_verify``)."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    both = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[Any]:
        """Return the expressions that ``text`` contains; empty if there are none."""
        # its own deadline is an alarm, which only a main thread may set: the pool keeps ours
        answers: list[Any] = parse(text, extraction_config=both, parsing_timeout=None)
        return answers

    def compare(request: ScoreCompletions) -> float:
        """Return 1 if the answer is mathematically equal to the expected one, else 0. Raises :class:`Unscorable` if the
        expected answer is not an expression."""
        expected = str(column(request, answer_column))
        gold = parsed(expected) or parsed(f"${expected}$")
        if not gold:
            raise Unscorable(
                f"the expected answer {expected[:80]!r} is not a mathematical expression", remedy="fix the row"
            )
        return float(verify(gold, parsed(request.completions[0]), timeout_seconds=None))

    return compare
