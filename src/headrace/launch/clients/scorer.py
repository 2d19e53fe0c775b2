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


@dataclass(slots=True, eq=False)
class _Place:
    """Where a worker stands, and calls wait while it is replaced."""

    worker: Worker | None = None
    up: asyncio.Event = field(default_factory=asyncio.Event)
    load: int = 0


class ScorerPool:
    """The :class:`~headrace.scoring.Scorer` contract over worker processes.

    A call that has not returned by its deadline costs its own episode: its worker is killed and replaced, and the other
    calls that worker had are made again. A worker that dies takes its calls along; they are made once more.
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
        self._free = asyncio.Semaphore(num_workers * concurrency)
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
        async with self._free:
            for _ in range(2):
                scores = await self._attempt(task, completions)
                if scores is not None:
                    return scores
        return Scores(rewards=(), failure="reward_crashed: the process that computed it died twice")

    async def _attempt(self, task: Task, completions: tuple[str, ...]) -> Scores | None:
        """One call; ``None`` if its worker died under it."""
        place = min(self._places, key=lambda place: place.load)
        await place.up.wait()
        worker = place.worker
        assert worker is not None
        peer = worker.peer
        call = peer.next_call()
        scored = peer.expect(call, Scored)
        place.load += 1
        try:
            peer.send(Score(call=call, prompt=task.prompt, completions=completions, row=task.row))
            async with asyncio.timeout(self._timeout_s):
                answer: Scored = await scored
        except TimeoutError:
            self._warn(f"a reward has not returned for {self._timeout_s:g} s: its worker is replaced")
            if place.worker is worker:
                await worker.kill()
            return Scores(rewards=(), failure=f"reward_timeout: no reward for {self._timeout_s:g} s")
        except asyncio.CancelledError:
            if scored.cancelled() and not _being_cancelled():
                return None  # the worker died, not we
            raise
        finally:
            place.load -= 1
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
                if worker.peer.ready.done():
                    self.by_group = bool(worker.peer.ready.result().facts["by_group"])
                    place.worker = worker
                    place.up.set()
                cause = await dying
                place.up.clear()
                place.worker = None
                await asyncio.sleep(0)  # its last words may still be on the way
                listening.cancel()
            self._count_death(worker.peer, cause)
            worker.peer.close()

    def _count_death(self, peer: Peer, cause: str) -> None:
        if peer.last_words is not None:
            raise peer.last_words
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise EnvError(
                f"{self._deaths} scoring workers died one after the other; the last: {cause}",
                remedy="the reward function kills its process: look at logs/scorer.log in the run directory",
            )
        self._warn(f"a scoring worker died ({cause}); its calls are made again")


def _being_cancelled() -> bool:
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
