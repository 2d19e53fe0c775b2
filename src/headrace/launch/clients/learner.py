"""A learner in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import (
    LogprobsAre,
    Published,
    Saved,
    SnapshotTaken,
    StepReport,
    Trained,
    Working,
)
from headrace.base.types.messages.learner import Logprobs, Publish, Resend, Save, Train
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import WeightUpdate
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer
from headrace.learner.base import Publication

COMPUTE_DEADLINE_S = 24 * 3600.0
"""Longest wait for one answer of a learner that works. One that stands still, or dies, ends the wait much sooner: see
:mod:`headrace.launch.vitals`."""


class RankClient(Peer):
    """One rank of a learner: it is given no orders by the controller, and says what it is at."""

    working: Working | None = None
    """What it said last; ``None`` before the first time."""
    heard_s = 0.0
    """When that was, on the clock."""

    def handle(self, message: object) -> None:
        if isinstance(message, Working):
            self.working, self.heard_s = message, RealClock().now()
        else:
            super().handle(message)


class LearnerClient(RankClient):
    """The :class:`~headrace.learner.Learner` contract over a channel."""

    def __init__(
        self,
        name: str,
        channel: ControllerChannel,
        *,
        token: str,
        on_spans: Callable[[Sequence[Span]], None],
        deadline_s: float,
    ) -> None:
        super().__init__(name, channel, token=token, on_spans=on_spans)
        self._deadline_s = deadline_s
        self._announced: dict[int, asyncio.Future[Published]] = {}
        self.receivers: Callable[[], tuple[str, ...]] = tuple
        """Where the engines take weights, for transports that send to somebody."""
        self.lacking: Callable[[int], tuple[str, ...]] = lambda _: ()
        """The same, of the engines that have not got a version."""
        self.version = -1
        """The newest version that it has taken a snapshot of."""

    async def train(self, batch: Batch) -> StepReport:
        call = self.next_call()
        trained = self.expect(call, Trained)
        self.send(Train(call=call, batch=batch))
        return (await self.answer(trained, f"train step {batch.step}", COMPUTE_DEADLINE_S)).report

    async def logprobs(self, batch: Batch) -> FloatColumn:
        call = self.next_call()
        computed = self.expect(call, LogprobsAre)
        self.send(Logprobs(call=call, batch=batch))
        return (await self.answer(computed, "compute logprobs", COMPUTE_DEADLINE_S)).logprobs_N

    async def snapshot(self, version: int, slot: int) -> Publication:
        call = self.next_call()
        taken = self.expect(call, SnapshotTaken)
        self._announced[version] = self.expect(call, Published)
        self.send(Publish(call=call, version=version, slot=slot, to=self.receivers()))
        try:  # the order waits behind the step that is running
            answer = await self.answer(taken, f"snapshot version {version}", COMPUTE_DEADLINE_S)
        except BaseException:
            self._announced.pop(version).cancel()
            raise
        self.version = version
        return Publication(version=version, slot=slot, exposed_s=answer.seconds)

    async def published(self, publication: Publication) -> WeightUpdate:
        version = publication.version
        announced = self._announced.pop(version)
        return (await self.answer(announced, f"publish version {version}", self._deadline_s)).update

    async def resend(self, publication: Publication) -> WeightUpdate:
        call, version = self.next_call(), publication.version
        announced = self.expect(call, Published)
        self.send(Resend(call=call, version=version, slot=publication.slot, to=self.lacking(version)))
        return (await self.answer(announced, f"send version {version} again, whole", COMPUTE_DEADLINE_S)).update

    async def save(self, directory: Path) -> None:
        call = self.next_call()
        saved = self.expect(call, Saved)
        self.send(Save(call=call, directory=str(directory)))
        await self.answer(saved, f"save {directory}", COMPUTE_DEADLINE_S)
