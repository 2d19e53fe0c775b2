"""The sync loop of the controller. It delivers each published version of the weights to the engines, until every engine
uses it. An engine *stages* a version when it loads and verifies the weights while it still uses older ones, and
*commits* the version when it uses the new weights from then on.

The learner itself announces a version to the engines on its machine. They stage it while they decode, and commit it
between two of their steps, either all at once or one engine after another. This loop requests the stages and commits
that the announcement has not started, records the commits, and delivers the newest version to engines that join late.
"""

from __future__ import annotations

import asyncio
import hashlib

from headrace.base.errors import NeedsFull, WeightsError
from headrace.base.types.weights import NUM_SLOTS, Interrupt, SwapReport, WeightUpdate
from headrace.control.board import LoopContract
from headrace.control.state import RunState
from headrace.flow.flow import Signal
from headrace.learner.base import Publication

MAX_SENDS = 4
"""Maximum number of times that one version is sent; after that the run ends. Engines may die or join while a version is
sent."""
RESEND_DELAY_S = 1.0
"""Seconds before a version is sent again. After that time, the death of an engine that could not be reached has been
detected."""


class SyncLoop:
    """The controller's sync loop. It consumes publications (snapshots of the learner's weights) and turns each into a
    committed version. A version is committed when every connected engine uses it.

    There are two weight buffers, called slots and numbered from 0: the engines read the buffer of the last committed
    version, and the learner writes to the other.
    """

    contract = LoopContract(
        name="sync",
        consumes="published versions",
        produces="commits, which free slots",
        waits_for="a publication, an engine that comes late; stage and commit",
        unblocked_by="learner, engine",
    )

    def __init__(self, state: RunState) -> None:
        """Create the loop with all buffers free and no published version."""
        self._state = state
        self._published: asyncio.Queue[Publication] = asyncio.Queue(maxsize=NUM_SLOTS)
        """The publications that were not delivered to the engines yet."""
        self._free_slots = set(range(NUM_SLOTS))
        """The buffers that no engine reads and that are not reserved."""
        self._committed_slot: int | None = None
        """The buffer of the last committed version, which the engines read; ``None`` before the first commit."""
        self._newest: tuple[Publication, WeightUpdate] | None = None
        """The newest committed version; ``None`` before the first."""
        self._late_engine_skipped = False
        """Whether a late engine waits for the next version, because the newest could not be sent to it."""
        self._slot_freed = Signal()
        """A signal that is sent when a buffer becomes free."""
        self.earlier_checksums: dict[int, str] = {}
        """The hashes of the weights that an earlier life of the run committed, by version. A version that is made again
        is compared with its hash."""

    async def free_slot(self) -> int:
        """Wait for a free weight buffer, reserve it for the learner's next snapshot, and return its index."""
        while not self._free_slots:
            await self._slot_freed.wait()
        return self._free_slots.pop()

    def publish(self, publication: Publication) -> None:
        """Add a snapshot of the learner's weights to the queue of versions that this loop delivers to the engines."""
        self._published.put_nowait(publication)

    async def wait_until_drained(self) -> None:
        """Wait until every published version is committed."""
        await self._published.join()

    async def run(self) -> None:
        """Deliver each published version to the engines, and the newest version to engines that join late, until
        cancelled."""
        state = self._state
        while True:
            with state.board.waiting("sync", "a new version", on="learner"):
                publication = await self._next_publication()
            if publication is None:
                await self._catch_up()
                continue
            await self.deliver(publication)
            self._published.task_done()

    async def deliver(self, publication: Publication) -> None:
        """Wait until one version is announced, staged and committed on all engines; then free the slots of its groups
        and the buffer of the previous version."""
        state = self._state
        clock = state.parts.clock
        version = publication.version
        start_s = clock.now()
        with state.board.waiting("sync", f"the announcement of version {version}", on="learner"):
            update = await self._wait_for_announcement(publication)
        state.span("sync", "publish", start_s, version)
        update, report = await self._stage_and_commit_everywhere(publication, update)
        state.metrics.version_committed(update, report)
        # A late engine that was skipped has received this version like all other engines.
        self._newest, self._late_engine_skipped = (publication, update), False
        self._mark_committed(publication.slot)
        checksum = version_checksum(update)
        self._compare_with_earlier_life(version, checksum)
        state.flow.record_version_committed(version, checksum)
        state.board.record_progress()

    async def _next_publication(self) -> Publication | None:
        """Wait for the next publication and return it; return ``None`` if an engine that lacks the newest version joins
        earlier."""
        engine_set = self._state.parts.engine_set
        if engine_set is None or self._late_engine_skipped:
            return await self._published.get()
        async with asyncio.TaskGroup() as group:
            late, published = group.create_task(engine_set.wait_for_lagging()), group.create_task(self._published.get())
            await asyncio.wait({late, published}, return_when=asyncio.FIRST_COMPLETED)
            late.cancel()
            if not published.done():
                published.cancel()
        return None if published.cancelled() else published.result()

    async def _wait_for_announcement(self, publication: Publication) -> WeightUpdate:
        """Wait until the learner has hashed and announced the version, and return the update. If the version could not
        be sent because engines have died, let the learner send it again to the remaining engines."""
        try:
            return await self._state.parts.learner.wait_until_published(publication)
        except WeightsError as error:
            if self._state.parts.engine_set is None:
                raise
            await asyncio.sleep(RESEND_DELAY_S)
            return await self._resend(publication, error)

    async def _resend(
        self, publication: Publication, error: WeightsError, staged: WeightUpdate | None = None
    ) -> WeightUpdate:
        """Let the learner send the full weights of ``publication`` again to the engines that lack them, and return the
        new update. ``error`` makes this necessary. ``staged`` is the update that other engines have staged; if the
        version still cannot be sent, the engines that lack it are dropped and ``staged`` is returned. Raises the last
        error after :data:`MAX_SENDS` failures, or the first error if there is only one engine."""
        engine_set = self._state.parts.engine_set
        for num_left in reversed(range(MAX_SENDS)):
            self._state.warn(f"weights sent again, whole: {error.problem}", kind="weights sent again")
            if engine_set is not None:
                await engine_set.wait_for_any()
            try:
                with self._state.board.waiting("sync", f"version {publication.version}, sent again", on="learner"):
                    return await self._state.parts.learner.resend(publication)
            except WeightsError as next_error:
                if staged is not None and self._drop_lagging(publication.version, next_error):
                    return staged
                if engine_set is None or not num_left:
                    raise
                error = next_error
            await asyncio.sleep(RESEND_DELAY_S)
        raise AssertionError("the last error is raised")

    async def _catch_up(self) -> None:
        """Deliver the newest version to an engine that has joined late. If the version would have to be sent again
        while no buffer is free, the engine waits for the next version instead."""
        assert self._newest is not None
        publication, update = self._newest
        try:
            await self._stage_and_commit(update)
        except NeedsFull as refusal:
            if not self._free_slots:
                self._late_engine_skipped = True
                return
            await self._stage_and_commit_everywhere(
                publication, await self._resend(publication, refusal, update), sent_again=True
            )

    async def _stage_and_commit_everywhere(
        self, publication: Publication, update: WeightUpdate, *, sent_again: bool = False
    ) -> tuple[WeightUpdate, SwapReport]:
        """Stage and commit ``update``, the update of ``publication``, on all engines. Return the update that was used,
        and the report on the commit.

        If an engine cannot apply the update, the full weights are sent again. An engine that cannot apply these either
        (``sent_again`` says that they were sent already) is dropped from this version, if other engines can apply it.
        Raises after :data:`MAX_SENDS` tries.
        """
        tries = 1
        while True:
            try:
                return update, await self._stage_and_commit(update)
            except NeedsFull as refusal:
                error = refusal
            if sent_again and self._drop_lagging(publication.version, error):
                continue
            if tries == MAX_SENDS:
                raise error
            update, sent_again, tries = await self._resend(publication, error, update), True, tries + 1

    def _drop_lagging(self, version: int, error: WeightsError) -> bool:
        """Let the engines that have staged ``version`` continue without the engines that have not, because of
        ``error``. Return whether this was possible; false if no engine has staged the version, or if there is only one
        engine."""
        engine_set = self._state.parts.engine_set
        return engine_set is not None and engine_set.drop_lagging(version, error.problem)

    async def _stage_and_commit(self, update: WeightUpdate) -> SwapReport:
        """Stage an update on the engines and commit it, without retries, and return the report on the commit."""
        state, version = self._state, update.version
        clock, engine = state.parts.clock, state.parts.engine
        start_s = clock.now()
        if update.note:
            state.warn(update.note)
        with state.board.waiting("sync", f"the staging of version {version}", on="engine"):
            await engine.stage(update)
        state.span("sync", "stage", start_s, version)
        start_s = clock.now()
        with state.board.waiting("sync", f"the commit of version {version}", on="engine"):
            report = await engine.commit(version, state.parts.interrupt)
        if state.parts.interrupt is Interrupt.SLEEP and state.flow.state.next_step > version:
            # the engine woke up for the commit, and the learner still has a step to train
            await engine.pause(release=True)
        state.span("sync", "commit", start_s, version)
        return report

    def _mark_committed(self, slot: int) -> None:
        """Record that ``slot`` is the buffer of the committed version, and free the buffer of the version before it."""
        # Engines read a committed buffer until the next commit.
        if self._committed_slot is not None:
            self._free_slots.add(self._committed_slot)
        self._committed_slot = slot
        self._slot_freed.notify()

    def _compare_with_earlier_life(self, version: int, checksum: str) -> None:
        """Warn if ``version`` was committed in an earlier life of the run with other weights. ``checksum`` is the hash
        of its weights in this life."""
        earlier_checksum = self.earlier_checksums.pop(version, checksum)
        if earlier_checksum != checksum:
            self._state.warn(
                f"version {version} has other weights than before the restart: settings, threads or software changed; "
                "tokens that the earlier weights sampled keep the logprobs they were sampled with"
            )


def version_checksum(update: WeightUpdate) -> str:
    """Return one hash of all weights of the version, as hexadecimal text: the hash of the hashes of all tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for checksum in update.checksums:
        digest.update(checksum.to_bytes(8, "big"))
    return digest.hexdigest()
