"""Rewards for mathematical answers, which are compared by mathematical equality with the package ``math-verify`` (the
extra ``math``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, Literal, Self

from pydantic import Field

from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Grader, RewardSection
from headrace.rollout.scoring.grading import BlockingGrader, Unscorable, get_column


class MathReward(RewardSection):
    """1 if the last answer in the completion is mathematically equal to the expected answer (``\\frac12`` and ``0.5``,
    sets, intervals, equations), and 0 if it is not or if there is no answer.

    Answers are parsed, never evaluated as Python. The comparison of some expressions never ends; ``timeout_s`` then
    ends it together with its worker. Source: huggingface/Math-Verify.
    """

    kind: Literal["math"] = "math"
    """Selects this reward."""
    answer_column: str = "answer"
    """The column with the expected answer: LaTeX, plain text or a number."""
    timeout_s: float = Field(default=10.0, gt=0)
    """The time limit of a comparison, in seconds. A comparison that takes longer fails, and its worker is replaced."""

    def columns(self) -> dict[str, str]:
        """Return the column with the expected answer, which every row must have, and the setting that names it."""
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
        return BlockingGrader(_build_comparison(self.answer_column), executor)


def _build_comparison(answer_column: str) -> Callable[[ScoreCompletions], float]:
    """Return a function that grades a completion: it compares the completion's answer with the value of
    ``answer_column`` as mathematics (``math_verify``)."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    extractors = (LatexExtractionConfig(), ExprExtractionConfig())

    def extract(text: str) -> list[Any]:
        """Return the mathematical expressions in ``text``; empty if there are none."""
        # the time limit of math_verify is an alarm signal, which needs the main thread: the worker pool limits the time
        answers: list[Any] = parse(text, extraction_config=extractors, parsing_timeout=None)
        return answers

    def compare(request: ScoreCompletions) -> float:
        """Return 1 if the answer is mathematically equal to the expected one, else 0. Raises :class:`Unscorable` if the
        expected answer is not an expression."""
        expected = str(get_column(request, answer_column))
        gold = extract(expected) or extract(f"${expected}$")
        if not gold:
            raise Unscorable(
                f"the expected answer {expected[:80]!r} is not a mathematical expression", remedy="fix the row"
            )
        return float(verify(gold, extract(request.completions[0]), timeout_seconds=None))

    return compare
