"""Rewards for answers that must equal an expected text, or one of several expected texts."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

import pydantic

from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Grader, RewardSection
from headrace.rollout.scoring.grading import BlockingGrader, get_column


class ExactReward(RewardSection):
    """1 if the answer in the completion equals the expected answer of the row, and 0 otherwise.

    The answer is the last match of ``pattern``, or the whole completion without a pattern. White space at its ends is
    ignored. If the row contains a list, each of its elements is a correct answer.
    """

    kind: Literal["exact"] = "exact"
    """Selects this reward."""
    answer_column: str = "answer"
    """The column with the expected answer, or with a list of accepted answers."""
    pattern: str = ""
    r"""A regular expression whose first group, or whole match, is the answer, such as ``answer is \(?([A-D])``. The
    last match is used; without a match the reward is 0. Unset: the whole completion is the answer."""
    ignore_case: bool = False
    """Whether upper and lower case letters are treated as equal."""

    @pydantic.model_validator(mode="after")
    def _pattern_compiles(self) -> Self:
        """Refuse a pattern that is not a regular expression."""
        compile_pattern(self.pattern, f"env.rewards {self.label!r}: pattern")
        return self

    def columns(self) -> dict[str, str]:
        """Return the column with the expected answer, which every row must have, and the setting that names it."""
        return {self.answer_column: f"answer_column={self.answer_column!r}"}

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return a grader that compares texts."""
        return BlockingGrader(self.grade, executor)

    def grade(self, request: ScoreCompletions) -> float:
        """Return 1 if the answer in the completion is accepted, else 0.

        >>> ask = ScoreCompletions(call=0, prompt="", completions=("so the answer is B.",), row={"answer": ["b", "c"]})
        >>> ExactReward(pattern=r"answer is (\\w)", ignore_case=True).grade(ask)
        1.0
        """
        expected = get_column(request, self.answer_column)
        given = find_match(self.pattern, request.completions[0])
        accepted = [str(each) for each in (expected if isinstance(expected, list | tuple) else [expected])]
        return float(given is not None and self._normalize(given) in [self._normalize(each) for each in accepted])

    def _normalize(self, text: str) -> str:
        """Return the text in a form that can be compared: without outer white space and, with ``ignore_case``, without
        upper case."""
        return text.strip().casefold() if self.ignore_case else text.strip()


def compile_pattern(pattern: str, setting: str) -> re.Pattern[str]:
    """Return the compiled regular expression ``pattern``. Raises :class:`ConfigError` if it is invalid; ``setting`` is
    the name of its setting for the error."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{setting}={pattern!r} is not a regular expression: {error}", remedy="fix it") from None


def find_match(pattern: str, text: str) -> str | None:
    """Return the last match of ``pattern`` in ``text``: the first group of the match that is not empty, or the whole
    match. Without a pattern, return the text itself; without a match, return ``None``."""
    if not pattern:
        return text
    match = None
    for match in re.finditer(pattern, text):  # noqa: B007 - the last one is wanted
        pass
    if match is None:
        return None
    return next((group for group in match.groups() if group is not None), match[0])
