"""The client of a learner that runs in another process, or in several, its *ranks*. The controller talks to rank 0,
which passes orders on. To *publish* a version is to take a snapshot of the weights into one of the shared buffers
(slots), and then to hash it and announce or send it to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import (
    LogprobsReply,
    Published,
    Saved,
    SnapshotTaken,
    StepReport,
    Trained,
    Working,
)
from headrace.base.types.messages.learner import BatchPart, Logprobs, Publish, Resend, Save, Train
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import Interrupt, WeightUpdate
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer
from headrace.learner.base import Publication

PART_BYTES = 32 * 2**20
"""Size of a part of a batch that travels as one message, in bytes; a larger sample is one message."""
COMPUTE_DEADLINE_S = 24 * 3600.0
"""Longest wait, in seconds, for one answer of a learner that works. If it hangs or dies, the wait ends much sooner: see
:mod:`headrace.launch.vitals`."""


class RankClient(Peer):
    """The controller's end of the conversation with one rank of a learner. A rank reports what it is busy with, so that
    a hang is noticed; ranks other than 0 get no orders from the controller."""

    working: Working | None = None
    """The latest report on its work; ``None`` before the first."""
    heard_s = 0.0
    """The time at which that report arrived, in seconds on this process's clock."""

    def handle(self, message: object) -> None:
        """Store a report on the rank's work with the time of its arrival; any other message is unexpected here, and
        raises :class:`~headrace.base.errors.RunError`."""
        if isinstance(message, Working):
            self.working, self.heard_s = message, RealClock().now()
        else:
            super().handle(message)


class LearnerClient(RankClient):
    """The client of a learner, which implements the :class:`~headrace.learner.Learner` contract over a channel to rank
    0. ``deadline_s`` is the longest wait for a version to be published after its snapshot."""

    def __init__(
        self,
        name: str,
        channel: ControllerChannel,
        *,
        token: str,
        on_spans: Callable[[Sequence[Span]], None],
        deadline_s: float,
    ) -> None:
        """Make the client of the learner process ``name`` (rank 0) over ``channel``. ``deadline_s`` is described at the
        class, the others at :class:`~headrace.launch.clients.peer.Peer`."""
        super().__init__(name, channel, token=token, on_spans=on_spans)
        self._deadline_s = deadline_s
        self._announced: dict[int, asyncio.Future[Published]] = {}
        self._saving: dict[Path, asyncio.Future[Saved]] = {}
        self.receivers: Callable[[], tuple[str, ...]] = tuple
        """Returns the addresses to which weights are sent; none for transports with which engines fetch them."""
        self.lacking: Callable[[int], tuple[str, ...]] = lambda _: ()
        """Returns the addresses of the engines that have not staged a version."""
        self.engines_in_step: Callable[[], Mapping[str, str]] = dict
        """Returns the engines that the learner may announce a new version to: the address at which each receives
        orders, and the one to which weights are sent. Only engines that use the newest version are among them: an
        engine that still stages another version must not be ordered to stage the next one over it."""
        self.commit_when_staged: Callable[[], Interrupt | None] = lambda: None
        """Returns the way in which these engines commit a version as soon as it is staged; ``None``: by order of the
        controller."""
        self.version = -1
        """The newest version of which the learner has taken a snapshot."""

    async def train(self, batch: Batch) -> StepReport:
        """Let the learner make one step on ``batch``, and return the report of the step, with its metrics."""
        call = self.next_call()
        trained = self.expect(call, Trained)
        last, num_parts = self._send_parts(call, batch)
        self.send(Train(call=call, batch=last, num_parts=num_parts))
        return (await self.answer(trained, f"train step {batch.step}", COMPUTE_DEADLINE_S)).report

    async def logprobs(self, batch: Batch) -> FloatColumn:
        """Let the learner compute the logprob of each token of a batch under its present weights, and return them in
        the order of the batch's tokens."""
        call = self.next_call()
        computed = self.expect(call, LogprobsReply)
        last, num_parts = self._send_parts(call, batch)
        self.send(Logprobs(call=call, batch=last, num_parts=num_parts))
        return (await self.answer(computed, "compute logprobs", COMPUTE_DEADLINE_S)).logprobs_N

    def _send_parts(self, call: int, batch: Batch) -> tuple[Batch, int]:
        """Send all but the last part of a batch, for the order ``call``, which is sent next. Return the last part and
        the number of parts that were sent."""
        *parts, last = batch.divide(PART_BYTES)
        for part in parts:
            self.send(BatchPart(call=call, batch=part))
        return last, len(parts)

    async def snapshot(self, version: int, slot: int) -> Publication:
        """Let the learner copy its weights to the buffer ``slot`` as ``version``, and wait until that is done. It
        publishes the copy afterwards, while it trains on; :meth:`published` waits for that. The result says how long
        training stood still for the copy."""
        call = self.next_call()
        taken = self.expect(call, SnapshotTaken)
        self._announced[version] = self.expect(call, Published)
        # The learner reaches the engines' sockets only where it runs on their machine.
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
        try:  # the learner carries out this order after the step that is running
            answer = await self.answer(taken, f"snapshot version {version}", COMPUTE_DEADLINE_S)
        except BaseException:
            self._announced.pop(version).cancel()
            raise
        self.version = version
        return Publication(version=version, slot=slot, exposed_s=answer.seconds)

    async def published(self, publication: Publication) -> WeightUpdate:
        """Wait until the learner has published the version of which :meth:`snapshot` has returned the publication, and
        return the update with which engines stage it."""
        version = publication.version
        announced = self._announced.pop(version)
        return (await self.answer(announced, f"publish version {version}", self._deadline_s)).update

    async def resend(self, publication: Publication) -> WeightUpdate:
        """Let the learner send a version once more, whole instead of as a difference, to the engines that lack it, and
        return the update with which they stage it."""
        call, version = self.next_call(), publication.version
        announced = self.expect(call, Published)
        self.send(Resend(call=call, version=version, slot=publication.slot, to=self.lacking(version)))
        return (await self.answer(announced, f"send version {version} again, whole", COMPUTE_DEADLINE_S)).update

    async def save(self, directory: Path) -> None:
        """Let the learner write a checkpoint (weights, optimizer state and so on) to ``directory``, and wait until it
        can train on. With several ranks it writes the files afterwards, while it trains; :meth:`saved` waits for
        that."""
        call = self.next_call()
        taken = self.expect(call, SnapshotTaken)
        self._saving[directory] = self.expect(call, Saved)
        self.send(Save(call=call, directory=str(directory)))
        try:
            await self.answer(taken, f"copy its state for {directory}", COMPUTE_DEADLINE_S)
        except BaseException:
            self._saving.pop(directory).cancel()
            raise

    async def saved(self, directory: Path) -> None:
        """Wait until the checkpoint that :meth:`save` ordered is complete in ``directory``."""
        await self.answer(self._saving.pop(directory), f"save {directory}", COMPUTE_DEADLINE_S)
