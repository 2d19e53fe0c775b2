"""Brings published versions to the engine: stage while it decodes, commit between two of its steps."""

from __future__ import annotations

import asyncio
import hashlib

from headrace.control.board import LoopContract
from headrace.control.state import RunState
from headrace.errors import DeadlineError, NeedsFull
from headrace.flow.signal import Signal
from headrace.learner.base import Publication
from headrace.types.weights import WeightUpdate

NUM_SLOTS = 2


class SyncLoop:
    """Publications in, committed versions out.

    Two buffers: the engine reads the one it committed last, the learner fills the other.
    """

    contract = LoopContract(
        name="sync",
        consumes="published versions",
        produces="commits, which free slots",
        waits_for="a publication; stage and commit",
        unblocked_by="learner, engine",
    )

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._published: asyncio.Queue[Publication] = asyncio.Queue(maxsize=NUM_SLOTS)
        self._free = set(range(NUM_SLOTS))
        self._committed_slot: int | None = None
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
                publication = await self._published.get()
            await self.bring(publication)
            self._published.task_done()

    async def bring(self, publication: Publication) -> None:
        """One version, from its snapshot to its commit."""
        state = self._state
        clock = state.parts.clock
        version = publication.version
        start_s = clock.now()
        with state.board.waiting("sync", f"the announcement of version {version}", on="learner"):
            update = await state.parts.learner.published(publication)
        state.span("sync", "publish", start_s, version)
        start_s = clock.now()
        try:
            with state.board.waiting("sync", f"the staging of version {version}", on="engine"):
                await self._stage(update, publication)
            state.span("sync", "stage", start_s, version)
            start_s = clock.now()
            with state.board.waiting("sync", f"the commit of version {version}", on="engine"):
                report = await state.parts.engine.commit(version, state.parts.interrupt)
        except DeadlineError as late:
            raise DeadlineError(f"{late.problem}; {self._last_words(update)}", remedy=late.remedy) from None
        state.span("sync", "commit", start_s, update.version)
        state.tally.commit_gaps_s.append(report.gap_s)
        state.tally.restarted += report.restarted
        state.tally.versions.append(update.version)
        self._release(update.slot)
        checksum = version_checksum(update)
        self._compare(update.version, checksum)
        state.flow.committed(update.version, checksum)
        state.board.progress()

    async def _stage(self, update: WeightUpdate, publication: Publication) -> None:
        """What the engine could not use as it came is sent once more, whole."""
        engine, learner = self._state.parts.engine, self._state.parts.learner
        try:
            await engine.stage(update)
        except NeedsFull as refusal:
            self._state.warn(f"weights sent again, whole: {refusal.problem}", kind="weights sent again")
            await engine.stage(await learner.resend(publication))

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
