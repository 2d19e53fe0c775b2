"""Scoring workers: processes that call the user's reward function, replaced when it hangs or kills them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import EnvError
from headrace.launch.clients.peer import Peer
from headrace.scoring import Scores
from headrace.types.messages.controller import Scored
from headrace.types.messages.scorer import Score
from headrace.types.task import Task

SUSPECTS = 16
"""Calls whose worker has died that are made again at once."""
MAX_DEATHS = 8
"""Workers that may die one after the other without a single score between them."""


class Worker(Protocol):
    """A scoring process."""

    peer: Peer

    async def died(self) -> str:
        """Wait for its end; why, in words."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    def close(self) -> None:
        """Let go of it after its end; whoever still waits for an answer of it is cancelled."""
        ...


@dataclass(slots=True, eq=False)
class _Shift:
    """One worker, from its start to its end."""

    worker: Worker
    replaced: bool = False
    """Whether we ended it, because one of its calls did not return."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where a worker stands, and calls wait while it is replaced."""

    shift: _Shift | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    load: int = 0


class ScorerPool:
    """The :class:`~headrace.scoring.Scorer` contract over worker processes.

    A call that has not returned by its deadline costs its own episode: its worker is killed and replaced, and the other
    calls that worker had are made again. A worker that dies takes its calls along: any of them may have killed it, so
    they are made again a few at a time, and those that are under a dying worker once more, alone.
    """

    def __init__(
        self,
        start_worker: Callable[[], Awaitable[Worker]],
        *,
        num_workers: int,
        concurrency: int,
        timeout_s: float,
        warn: Callable[[str], None],
    ) -> None:
        self.by_group = False
        self._start_worker = start_worker
        self._timeout_s = timeout_s
        self._warn = warn
        self._places = [_Place() for _ in range(num_workers)]
        self._rounds = (asyncio.Semaphore(num_workers * concurrency), asyncio.Semaphore(SUSPECTS), asyncio.Semaphore(1))
        self._deaths = 0

    async def run(self) -> None:
        """Keep every place filled; ends only by cancellation, or when workers die one after the other."""
        async with asyncio.TaskGroup() as group:
            for place in self._places:
                group.create_task(self._keep(place))

    async def started(self) -> None:
        """Until every worker is there."""
        for place in self._places:
            await place.up.wait()

    async def score(self, task: Task, completions: tuple[str, ...]) -> Scores:
        for together in self._rounds:
            async with together:
                scores = await self._call(task, completions)
            if scores is not None:
                return scores
        return Scores(
            rewards=(), failure=f"reward_crashed: the process that computed it died, {len(self._rounds)} times"
        )

    async def _call(self, task: Task, completions: tuple[str, ...]) -> Scores | None:
        """One call, made again where its worker is replaced for another's sake; ``None`` if its worker died."""
        while True:
            place = min(self._places, key=lambda place: place.load)
            while place.shift is None:
                await place.up.wait()
            shift = place.shift
            place.load += 1
            try:
                scores = await self._attempt(shift, task, completions)
            finally:
                place.load -= 1
            if scores is not None or not shift.replaced:
                return scores

    async def _attempt(self, shift: _Shift, task: Task, completions: tuple[str, ...]) -> Scores | None:
        """One call of one worker; ``None`` if that ended under it."""
        peer = shift.worker.peer
        call = peer.next_call()
        scored = peer.expect(call, Scored)
        try:
            peer.send(Score(call=call, prompt=task.prompt, completions=completions, row=task.row))
            async with asyncio.timeout(self._timeout_s):
                answer: Scored = await scored
        except TimeoutError:
            self._warn(f"a reward has not returned for {self._timeout_s:g} s: its worker is replaced")
            shift.replaced = True
            await shift.worker.kill()
            return Scores(rewards=(), failure=f"reward_timeout: no reward for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            if scored.cancelled() and not _being_cancelled():
                return None  # the worker died, not we
            raise
        self._deaths = 0
        return Scores(rewards=answer.rewards, failure=answer.error)

    async def _keep(self, place: _Place) -> None:
        while True:
            worker = await self._start_worker()
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(worker.peer.listen())
                dying = group.create_task(worker.died())
                first: set[asyncio.Future[Any]] = {dying, worker.peer.ready}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                shift = _Shift(worker)
                if worker.peer.ready.done():
                    self.by_group = bool(worker.peer.ready.result().facts["by_group"])
                    place.shift = shift
                    place.up.set()
                cause = await dying
                place.up.clear()
                place.shift = None
                listening.cancel()
            worker.close()
            if not shift.replaced:
                self._count_death(worker.peer, cause)

    def _count_death(self, peer: Peer, cause: str) -> None:
        if peer.last_words is not None:
            raise peer.last_words
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise EnvError(
                f"{self._deaths} scoring workers died one after the other; the last: {cause}",
                remedy=f"the reward function kills its process: look at logs/{peer.name}.log in the run directory",
            )
        self._warn(f"a scoring worker died ({cause}); its calls are made again")


def _being_cancelled() -> bool:
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
