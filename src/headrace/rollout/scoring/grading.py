"""How a plain function of one completion becomes a grader: its failures become records."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from headrace.base.errors import HeadraceError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.scoring.base import Scores, Wanted


class Unscorable(HeadraceError):
    """A completion cannot be scored, through no fault of its own: the row lacks what is needed, a judge is away."""


class BlockingGrader:
    """Calls a function that computes, in a thread."""

    by_group = False
    wants: frozenset[Wanted] = frozenset()

    def __init__(self, grade: Callable[[ScoreCompletions], float | None], executor: ThreadPoolExecutor) -> None:
        self._grade = grade
        self._executor = executor

    async def score(self, request: ScoreCompletions, on_start: Callable[[], None]) -> Scores:
        def begin() -> float | None:
            on_start()
            return self._grade(request)

        return await told(asyncio.get_running_loop().run_in_executor(self._executor, begin))


async def told(grading: Awaitable[float | None]) -> Scores:
    """What became of it."""
    try:
        value = await grading
    except Unscorable as error:
        return Scores(rewards=(), failure=f"reward_error: {error.problem} ({error.remedy})")
    except Exception as error:  # noqa: BLE001 - the boundary of a scorer: its failure is a record
        words = f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace").decode()
        return Scores(rewards=(), failure=f"reward_error: {words}")
    if value is not None and not math.isfinite(value):
        return Scores(rewards=(), failure=f"reward_nan: returned {value}")
    return Scores(rewards=(value,))


def column(request: ScoreCompletions, name: str) -> object:
    """A column of the row; :class:`Unscorable` where it is missing."""
    if name not in request.row:
        raise Unscorable(
            f"the row has no column {name!r} (it has: {', '.join(request.row)})", remedy="name the column that it has"
        )
    return request.row[name]
