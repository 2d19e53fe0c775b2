"""The client of a learner. The learner runs in one process or in several processes, its *ranks*. The controller sends
orders to rank 0, which forwards them to the other ranks. To *publish* a version means to copy the weights into one of
the shared buffers (slots), to hash the copy, and to announce or send it to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import (
    Divided,
    LogprobsReply,
    Published,
    Saved,
    SnapshotTaken,
    StepReport,
    Trained,
    Working,
)
from headrace.base.types.messages.learner import Logprobs, Publish, Resend, Save, Train
from headrace.base.types.messages.parts import MessagePart, PartCollector, split_message
from headrace.base.types.outline import BatchOutline
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import Interrupt, WeightUpdate
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer
from headrace.learner.base import Publication

COMPUTE_DEADLINE_S = 24 * 3600.0
"""Longest time to wait for one answer of a learner that works, in seconds. If the learner hangs or dies, the wait ends
much sooner; see :mod:`headrace.launch.vitals`."""


class RankClient(Peer):
    """The controller's client of one rank of a learner. A rank reports its current unit of work, so that a hang can be
    detected. Ranks other than rank 0 receive no orders from the controller."""

    working: Working | None = None
    """The latest report about the rank's work; ``None`` before the first report."""
    heard_s = 0.0
    """The time at which that report arrived, in seconds on the clock of this process."""

    def last_report(self) -> str:
        """Return the unit of work that the rank has reported last, and how many units it has finished."""
        if self.working is None:
            return "it has reported no work yet"
        unit = self.working.what or "waiting for orders"
        return f"it reported last: {unit}, after {self.working.num_units} units of work"

    def handle(self, message: object) -> None:
        """Store a report about the rank's work, and the time of its arrival. Any other message raises
        :class:`~headrace.base.errors.RunError`."""
        if isinstance(message, Working):
            self.working, self.heard_s = message, RealClock().now()
        else:
            super().handle(message)


class LearnerClient(RankClient):
    """The client of a learner, which implements the :class:`~headrace.learner.Learner` contract over a channel to rank
    0. ``deadline_s`` is the longest time from the snapshot of a version until it is published, in seconds."""

    def __init__(
        self,
        name: str,
        channel: ControllerChannel,
        *,
        token: str,
        on_spans: Callable[[Sequence[Span]], None],
        deadline_s: float,
    ) -> None:
        """Create the client of the learner process ``name`` (rank 0) over ``channel``. The class describes
        ``deadline_s``, and :class:`~headrace.launch.clients.peer.Peer` describes the other arguments."""
        super().__init__(name, channel, token=token, on_spans=on_spans)
        self._deadline_s = deadline_s
        self._parts = PartCollector(Divided)
        """The parts of answers that are not complete."""
        self._publishing: dict[int, asyncio.Future[Published]] = {}
        """For each version that is being published, the future of the report."""
        self._saving: dict[Path, asyncio.Future[Saved]] = {}
        """For each checkpoint that is being written, the future of the report, by its directory."""
        self.receivers: Callable[[], tuple[str, ...]] = tuple
        """Returns the addresses to which weights are sent; empty for transports with which engines fetch weights."""
        self.addresses_without: Callable[[int], tuple[str, ...]] = lambda _: ()
        """Returns the addresses of the engines that have not staged the given version."""
        self.engines_in_step: Callable[[], Mapping[str, str]] = dict
        """Returns the engines to which the learner may announce a new version: for each address at which an engine
        receives orders, the address at which it receives weights. The result contains only engines that use the newest
        version, because an engine that still stages another version must not be ordered to stage the next version at
        the same time."""
        self.commit_when_staged: Callable[[], Interrupt | None] = lambda: None
        """The function that returns the interrupt mode with which these engines commit a version as soon as it is
        staged; ``None`` if they wait for the controller's order."""
        self.version = -1
        """The newest version that the learner has copied into a buffer; −1 before the first."""

    async def step(self, outline: BatchOutline) -> StepReport:
        """Order the learner to lay out the batch of ``outline`` and to make one step on it. Return the report of the
        step with its metrics."""
        call = self.next_call()
        trained = self.expect(call, Trained)
        self._send_divided(Train(call=call, outline=outline))
        return (await self.answer(trained, f"train step {outline.step}", COMPUTE_DEADLINE_S)).report

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Order the learner to compute the logprob of each token of ``batch`` under its current weights, and return
        them in the order of the batch's tokens."""
        call = self.next_call()
        computed = self.expect(call, LogprobsReply)
        self._send_divided(Logprobs(call=call, batch=batch))
        return (await self.answer(computed, "compute logprobs", COMPUTE_DEADLINE_S)).logprobs_N

    def _send_divided(self, order: Train | Logprobs) -> None:
        """Send ``order`` to the learner in parts."""
        for part in split_message(order, order.call):
            self.send(part)

    def handle(self, message: object) -> None:
        """Handle one message of the learner. The parts of an answer are collected, and the answer is delivered when it
        is complete. Every other message is handled as the client of any rank handles it."""
        if not isinstance(message, MessagePart):
            super().handle(message)
        elif (answer := self._parts.add(message)) is not None:
            self._route(answer)

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Order the learner to copy its weights into the buffer ``slot`` as ``version``, and wait until the copy is
        complete. The learner then publishes the copy while it continues to train; :meth:`wait_until_published` waits
        for that. The result contains how long training stood still for the copy."""
        call = self.next_call()
        reply = self.expect(call, SnapshotTaken)
        self._publishing[version] = self.expect(call, Published)
        # The learner can send to the engines' sockets only if it runs on the same machine.
        announce_to = dict(self.engines_in_step()) if self._channel.local_orders else {}
        self.send(
            Publish(
                call=call,
                version=version,
                slot=slot,
                to=self.receivers(),
                announce_to=announce_to,
                commit=self.commit_when_staged(),
            )
        )
        try:  # the learner executes this order after its current step
            answer = await self.answer(reply, f"snapshot version {version}", COMPUTE_DEADLINE_S)
        except BaseException:
            self._publishing.pop(version).cancel()
            raise
        self.version = version
        return Publication(version=version, slot=slot, exposed_s=answer.seconds)

    async def wait_until_published(self, publication: Publication) -> WeightUpdate:
        """Wait until the learner has published the version of ``publication``, which :meth:`snapshot` has returned.
        Return the update with which engines stage the version."""
        version = publication.version
        reply = self._publishing.pop(version)
        operation, setting = f"publish version {version}", "sync.deadline_s"
        return (await self.answer(reply, operation, self._deadline_s, setting=setting)).update

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Order the learner to send a version again to the engines that lack it, as complete weights instead of a
        difference. Return the update with which the engines stage the version."""
        call, version = self.next_call(), publication.version
        reply = self.expect(call, Published)
        self.send(Resend(call=call, version=version, slot=publication.slot, to=self.addresses_without(version)))
        return (await self.answer(reply, f"send version {version} again, whole", COMPUTE_DEADLINE_S)).update

    async def save(self, directory: Path) -> None:
        """Order the learner to write a checkpoint (weights, optimizer state and so on) to ``directory``, and wait until
        training can continue. With several ranks, the learner writes the files afterwards, while it trains;
        :meth:`wait_until_saved` waits for that."""
        call = self.next_call()
        reply = self.expect(call, SnapshotTaken)
        self._saving[directory] = self.expect(call, Saved)
        self.send(Save(call=call, directory=str(directory)))
        try:
            await self.answer(reply, f"copy its state for {directory}", COMPUTE_DEADLINE_S)
        except BaseException:
            self._saving.pop(directory).cancel()
            raise

    async def wait_until_saved(self, directory: Path) -> None:
        """Wait until the checkpoint that :meth:`save` has ordered is complete in ``directory``."""
        await self.answer(self._saving.pop(directory), f"save {directory}", COMPUTE_DEADLINE_S)
