"""Rewards for answers that must equal the expected text, or one of several texts."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Self

import pydantic

from headrace.base.errors import ConfigError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Grader, RewardSection
from headrace.rollout.scoring.grading import BlockingGrader, column


class ExactReward(RewardSection):
    """1 if the answer in the completion equals the one in the row, 0 if not.

    The answer is the last match of ``pattern``, or the whole completion; white space at its ends does not count. If the
    row has a list, any of its elements is right.
    """

    kind: Literal["exact"] = "exact"
    """Selects this reward."""
    answer_column: str = "answer"
    """The column with the expected answer, or a list of answers."""
    pattern: str = ""
    r"""A regular expression whose first group (or whole match) is the answer, such as ``answer is \(?([A-D])``; its
    last match counts, and no match is 0. Unset: the whole completion."""
    ignore_case: bool = False
    """Whether upper and lower case are equal."""

    @pydantic.model_validator(mode="after")
    def _pattern_compiles(self) -> Self:
        """Refuse a pattern that is not a regular expression."""
        compiled(self.pattern, f"env.rewards {self.label!r}: pattern")
        return self

    def columns(self) -> dict[str, str]:
        """Return the column of the expected answer, which every row must have, with the setting that names it."""
        return {self.answer_column: f"answer_column={self.answer_column!r}"}

    def grader(self, executor: ThreadPoolExecutor) -> Grader:
        """Return a grader that compares text."""
        return BlockingGrader(self.grade, executor)

    def grade(self, request: ScoreCompletions) -> float:
        """Return 1 if the completion's answer is accepted, else 0.

        >>> ask = ScoreCompletions(call=0, prompt="", completions=("so the answer is B.",), row={"answer": ["b", "c"]})
        >>> ExactReward(pattern=r"answer is (\\w)", ignore_case=True).grade(ask)
        1.0
        """
        expected = column(request, self.answer_column)
        given = found(self.pattern, request.completions[0])
        accepted = [str(each) for each in (expected if isinstance(expected, list | tuple) else [expected])]
        return float(given is not None and self._plain(given) in [self._plain(each) for each in accepted])

    def _plain(self, text: str) -> str:
        """Return the text in the form in which answers are compared."""
        return text.strip().casefold() if self.ignore_case else text.strip()


def compiled(pattern: str, what: str) -> re.Pattern[str]:
    """Return the compiled regular expression. ``what`` names its setting in the error: raises :class:`ConfigError` if
    it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{what}={pattern!r} is not a regular expression: {error}", remedy="fix it") from None


def found(pattern: str, text: str) -> str | None:
    """Return the last match of ``pattern`` in ``text``: its first group that matched, or the whole match. Without a
    pattern, return the text itself; without a match, ``None``."""
    if not pattern:
        return text
    match = None
    for match in re.finditer(pattern, text):  # noqa: B007 - the last one is wanted
        pass
    if match is None:
        return None
    return next((group for group in match.groups() if group is not None), match[0])
