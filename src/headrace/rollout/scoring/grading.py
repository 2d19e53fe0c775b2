"""Graders that call a plain function for one completion. Errors of the function become failures in the returned
scores."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.base.clock import being_cancelled
from headrace.base.errors import HeadraceError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import CallTimes, ContextField, Scores


class Unscorable(HeadraceError):
    """A completion cannot be scored for a reason other than its text: for example, the row lacks a value, or a judge
    cannot be reached."""


class BlockingGrader:
    """A grader of single completions that calls its function in a thread, so that the event loop of the scoring worker
    is not blocked."""

    by_group = False
    wants: frozenset[ContextField] = frozenset()

    def __init__(self, grade: Callable[[ScoreCompletions], float | None], executor: ThreadPoolExecutor) -> None:
        """Create a grader that calls ``grade`` in threads of ``executor``. ``grade`` returns the reward of a request's
        only completion; ``None`` means no reward."""
        self._grade = grade
        self._executor = executor
        self.times = CallTimes()
        """The durations of the calls."""

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None]) -> Scores:
        """Grade the completion of ``request`` in a thread, and return its scores; ``on_start`` is called when the
        thread begins."""
        (scores,) = await self.score_each([request], on_start)
        return scores

    async def score_each(self, requests: Sequence[ScoreCompletions], on_start: Callable[[], None]) -> list[Scores]:
        """Grade the completion of each of ``requests`` sequentially in one thread, and return the scores of each;
        ``on_start`` is called when the thread begins."""

        def call_all() -> list[Scores]:
            """Report that the calls begin, then make them."""
            on_start()
            return [self._grade_one(request) for request in requests]

        return await asyncio.get_running_loop().run_in_executor(self._executor, call_all)

    def _grade_one(self, request: ScoreCompletions) -> Scores:
        """Grade the completion of ``request``; an error becomes a failure."""
        try:
            with self.times.measure():
                return _scores_of_reward(self._grade(request))
        except BaseException as error:  # noqa: BLE001 - the boundary of graders: their failure is a record
            return _scores_of_error(error)


async def as_scores(grading: Awaitable[float | None]) -> Scores:
    """Await the reward of one completion and return it as scores. An error, or a number that is not finite, becomes a
    failure."""
    try:
        return _scores_of_reward(await grading)
    except BaseException as error:
        if being_cancelled():
            raise
        return _scores_of_error(error)


def _scores_of_reward(value: float | None) -> Scores:
    """Return the reward ``value`` as scores; a number that is not finite becomes a failure."""
    if value is not None and not math.isfinite(value):
        return Scores(rewards=(), failure=f"reward_nan: returned {value}")
    return Scores(rewards=(value,))


def _scores_of_error(error: BaseException) -> Scores:
    """Return the failure of a completion whose grading has raised ``error``."""
    if isinstance(error, Unscorable):
        return Scores(rewards=(), failure=f"reward_error: {error.problem} ({error.remedy})")
    words = f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace").decode()
    return Scores(rewards=(), failure=f"reward_error: {words}")


def get_column(request: ScoreCompletions, name: str) -> object:
    """Return the value of the column ``name`` in the request's row. Raises :class:`Unscorable` if the row has no such
    column."""
    if name not in request.row:
        raise Unscorable(
            f"the row has no column {name!r} (it has: {', '.join(request.row)})", remedy="name the column that it has"
        )
    return request.row[name]
