"""Brings published versions to the engines: stage while they decode, commit between two of their steps. An engine that
comes late gets the newest."""

from __future__ import annotations

import asyncio
import hashlib

from headrace.base.errors import DeadlineError, NeedsFull, WeightsError
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.control.board import LoopContract
from headrace.control.state import RunState
from headrace.flow.signal import Signal
from headrace.learner.base import Publication

NUM_SLOTS = 2
MAX_SENT = 4
"""How often one version is sent before the run ends: engines may die or come while it is on its way."""
SOON_S = 1.0
"""By then it is known that an engine is dead which could not be reached."""


class SyncLoop:
    """Publications in, committed versions out. A version is committed when every engine that is there uses it.

    Two buffers: the engines read the one they committed last, the learner fills the other.
    """

    contract = LoopContract(
        name="sync",
        consumes="published versions",
        produces="commits, which free slots",
        waits_for="a publication, an engine that comes late; stage and commit",
        unblocked_by="learner, engine",
    )

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._published: asyncio.Queue[Publication] = asyncio.Queue(maxsize=NUM_SLOTS)
        self._free = set(range(NUM_SLOTS))
        self._committed_slot: int | None = None
        self._newest: tuple[Publication, WeightUpdate] | None = None
        self._leaves_behind = False
        self._freed = Signal()
        self.earlier_checksums: dict[int, str] = {}
        """Versions that an earlier life of the run committed, and what their weights hashed to."""

    async def free_slot(self) -> int:
        """A buffer that no engine reads; waits until there is one."""
        while not self._free:
            await self._freed.wait()
        return self._free.pop()

    def publish(self, publication: Publication) -> None:
        """Hand a snapshot over."""
        self._published.put_nowait(publication)

    async def drained(self) -> None:
        """Until everything published is committed."""
        await self._published.join()

    async def run(self) -> None:
        """Until cancelled."""
        state = self._state
        while True:
            with state.board.waiting("sync", "a new version", on="learner"):
                publication = await self._next()
            if publication is None:
                await self._catch_up()
                continue
            await self.bring(publication)
            self._published.task_done()

    async def bring(self, publication: Publication) -> None:
        """One version, from its snapshot to its commit."""
        state = self._state
        clock = state.parts.clock
        version = publication.version
        start_s = clock.now()
        with state.board.waiting("sync", f"the announcement of version {version}", on="learner"):
            update = await self._announced(publication)
        state.span("sync", "publish", start_s, version)
        update, report = await self._into_use(publication, update)
        self._count(update, report)
        state.tally.versions.append(version)
        self._newest, self._leaves_behind = (publication, update), False
        self._release(publication.slot)
        checksum = version_checksum(update)
        self._compare(version, checksum)
        state.flow.committed(version, checksum)
        state.board.progress()

    def _count(self, update: WeightUpdate, report: SwapReport) -> None:
        tally = self._state.tally
        tally.commit_gaps_s.append(report.gap_s)
        tally.restarted += report.restarted
        tally.fresh_sync["sync/commits"] += 1
        tally.fresh_sync["sync/bytes"] += update.num_bytes
        tally.fresh_sync["sync/carried_over"] += report.carried_over
        tally.fresh_sync["sync/recomputed_tokens"] += report.recomputed_tokens
        tally.fresh_waits_s += report.waited_s

    async def _next(self) -> Publication | None:
        """What the learner publishes next; ``None`` where an engine lacks the newest version before."""
        crew = self._state.parts.crew
        if crew is None or self._leaves_behind:
            return await self._published.get()
        async with asyncio.TaskGroup() as group:
            late, published = group.create_task(crew.behind()), group.create_task(self._published.get())
            await asyncio.wait({late, published}, return_when=asyncio.FIRST_COMPLETED)
            late.cancel()
            if not published.done():
                published.cancel()
        return None if published.cancelled() else published.result()

    async def _announced(self, publication: Publication) -> WeightUpdate:
        """Where engines ended while it was sent to them, it is sent once more to those that are there then."""
        try:
            return await self._state.parts.learner.published(publication)
        except WeightsError as error:
            if self._state.parts.crew is None:
                raise
            await asyncio.sleep(SOON_S)
            return await self._again(publication, error)

    async def _again(
        self, publication: Publication, why: WeightsError, before: WeightUpdate | None = None
    ) -> WeightUpdate:
        """Sent once more, whole, to the engines that are there and lack it. ``before``: as others have brought it, who
        go on without those that it still does not reach."""
        crew = self._state.parts.crew
        for left in reversed(range(MAX_SENT)):
            self._state.warn(f"weights sent again, whole: {why.problem}", kind="weights sent again")
            if crew is not None:
                await crew.manned()
            try:
                return await self._state.parts.learner.resend(publication)
            except WeightsError as error:
                if before is not None and self._spare(publication.version, error):
                    return before
                if crew is None or not left:
                    raise
                why = error
            await asyncio.sleep(SOON_S)
        raise AssertionError("the last error is raised")

    async def _catch_up(self) -> None:
        """Bring the newest version to an engine that has come late. One that needs it sent, while the learner has a
        step to make first, gets the version of that step instead."""
        assert self._newest is not None
        publication, update = self._newest
        try:
            await self._once(update)
        except NeedsFull as refusal:
            if not self._free:
                self._leaves_behind = True
                return
            await self._into_use(publication, await self._again(publication, refusal, update), sent_again=True)

    async def _into_use(
        self, publication: Publication, update: WeightUpdate, *, sent_again: bool = False
    ) -> tuple[WeightUpdate, SwapReport]:
        """Staged and committed; what an engine could not use as it came is sent again, whole. One that cannot use that
        either is left behind, where others can."""
        tries = 1
        while True:
            try:
                return update, await self._once(update)
            except NeedsFull as refusal:
                why = refusal
            if sent_again and self._spare(publication.version, why):
                continue
            if tries == MAX_SENT:
                raise why
            update, sent_again, tries = await self._again(publication, why, update), True, tries + 1

    def _spare(self, version: int, why: WeightsError) -> bool:
        """Whether the engines that have brought ``version`` go on without the others."""
        crew = self._state.parts.crew
        return crew is not None and crew.spare(version, why.problem)

    async def _once(self, update: WeightUpdate) -> SwapReport:
        state, version = self._state, update.version
        clock, engine = state.parts.clock, state.parts.engine
        start_s = clock.now()
        try:
            with state.board.waiting("sync", f"the staging of version {version}", on="engine"):
                await engine.stage(update)
            state.span("sync", "stage", start_s, version)
            start_s = clock.now()
            with state.board.waiting("sync", f"the commit of version {version}", on="engine"):
                report = await engine.commit(version, state.parts.interrupt)
            if state.parts.interrupt is Interrupt.SLEEP and state.flow.state.next_step > version:
                await engine.pause(release=True)  # it woke, and the learner has another step to make
        except DeadlineError as late:
            raise DeadlineError(f"{late.problem}; {self._last_words(update)}", remedy=late.remedy) from None
        state.span("sync", "commit", start_s, version)
        return report

    def _last_words(self, update: WeightUpdate) -> str:
        engine = self._state.parts.engine.stats()
        return (
            f"the learner's last word: version {update.version} is published ({update.num_bytes} bytes at "
            f"{update.path!r}); the engine's: version {engine.version} in use, {engine.steps} steps made, "
            f"{engine.running} sequences running"
        )

    def _release(self, slot: int) -> None:
        if self._committed_slot is not None:
            self._free.add(self._committed_slot)
        self._committed_slot = slot
        self._freed.ring()

    def _compare(self, version: int, checksum: str) -> None:
        before = self.earlier_checksums.pop(version, checksum)
        if before != checksum:
            self._state.warn(
                f"version {version} has other weights than before the restart: settings, threads or software changed; "
                "tokens that the earlier weights sampled keep the logprobs they were sampled with"
            )


def version_checksum(update: WeightUpdate) -> str:
    """One hash of the hashes of all tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for checksum in update.checksums:
        digest.update(checksum.to_bytes(8, "big"))
    return digest.hexdigest()
