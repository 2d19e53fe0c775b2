"""The side of a served engine that lives in the wire's loop: one task for each answer, and the commits between them.

queue ──at most so many──▶ stream ──stop, length──▶ ended
  ▲                          │ ▲
  └── held while a commit ───┘ └── halted by a commit that ends streams; goes on behind its tokens, or anew
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, EngineFull, RequestError, SequenceFailed
from headrace.base.types.episode import StopReason
from headrace.base.types.messages.controller import Chunk, EngineStats
from headrace.base.types.recorded import Experts
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.wings.servers.client.answer import StreamedAnswer, StreamPart
from headrace.wings.servers.client.dialect import Ask, PauseMode, ServerDialect
from headrace.wings.servers.client.outbox import ChunkQueue
from headrace.wings.servers.client.ownership import Labels
from headrace.wings.servers.client.records import RoutingDecoder, refuse_kept
from headrace.wings.servers.client.server import Server
from headrace.wings.servers.client.wire import Wire

if TYPE_CHECKING:
    import httpx

ABORT = "abort"
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_ENDS = frozenset({"", ABORT, *_REASONS})
_OF_REQUESTS = frozenset({400, 413, 422, 429, 503})
"""Answers that say something of a request; others may be those of whatever stands at that address now."""
_RESUMES = frozenset({Interrupt.ABORT_RESUME, Interrupt.SLEEP})
_BY_ABORT = _RESUMES | {Interrupt.ABORT_RETRY}
_PATIENT = frozenset({Interrupt.DRAIN, Interrupt.BATCH})
HALT_S = 30.0
"""Longest that a server may take to end its streams once it has said that it stands still."""
WATCH_S = 5.0
"""How often a server that has answers to give, and gives none, is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """On which answers are streamed."""

    most: int
    """At once."""
    flush_tokens: int
    """A reader is told each time there are so many."""
    vocab_size: int
    """Ids run from 0 to one below it."""
    masks: bool = False
    """The server tells what each token was drawn from."""
    routes: RoutingDecoder | None = None
    """It tells the experts of each token, which are those of this model."""
    trained: bool = False
    """Its weights are this run's, and nobody else's."""


class AnswerStreams:
    """Owned by the loop: every method is called there."""

    def __init__(self, wire: Wire, server: Server, outbox: ChunkQueue, terms: StreamTerms, clock: Clock) -> None:
        self._wire, self._server, self._outbox, self._terms, self._clock = wire, server, outbox, terms, clock
        self._dialect: ServerDialect = server.dialect
        self._waiting: list[tuple[tuple[int, int], StreamedAnswer]] = []
        self._held: list[StreamedAnswer] | None = None
        """Those that came while nothing new is sent; ``None`` while it is."""
        self._running: dict[int, StreamedAnswer] = {}
        self._known: dict[int, StreamedAnswer] = {}
        self._going, self._changed = asyncio.Event(), asyncio.Event()
        self._going.set()
        self.labels = Labels(str(server), None if terms.trained else "")
        self._version = NOT_SAMPLED
        self._asleep = False
        """The server has given its memory back."""
        self._busy_since_s = 0.0
        self._heard_s = clock.now()
        self.stats = EngineStats()
        """Replaced, never changed: any thread may read it."""
        self._watching = wire.spawn(self._watch())

    def adopt(self, version: int) -> None:
        """The server has ``version``."""
        self._version = version
        self._count(version=version)

    def add(self, answer: StreamedAnswer) -> None:
        """Take it into the queue."""
        self._known[answer.request.request_id] = answer
        deadline_s = answer.request.deadline_s
        if deadline_s is not None:
            asyncio.get_running_loop().call_later(deadline_s, self._late, answer)
        self._queue(answer)
        self._admit()

    def withdraw(self, request_ids: Sequence[int], reason: StopReason) -> list[Chunk]:
        """Their last chunks; ids that are not known are ignored."""
        known = [self._known[one] for one in dict.fromkeys(request_ids) if one in self._known]
        for answer in known:
            self._leave(answer)
            if answer.task is not None:
                answer.task.cancel()
        self._admit()
        return [answer.chunk(reason) for answer in known]

    async def hold(self) -> None:
        """Stand still until :meth:`go_on`."""
        self._begin_holding()
        await self._dialect.hold(self._wire.client, PauseMode())

    async def sleep(self) -> None:
        """The same, without the memory that the server can give back."""
        self._begin_holding()
        self._going.clear()
        await self._dialect.hold(self._wire.client, PauseMode(abort=True))
        await self._halt()
        await self._dialect.sleep(self._wire.client)
        self._asleep = True

    async def go_on(self) -> None:
        """Have work again."""
        await self._wake()
        await self._dialect.go_on(self._wire.client)
        self._going.set()
        self._end_holding()

    async def _wake(self) -> None:
        if self._asleep:
            await self._dialect.wake(self._wire.client)
            self._asleep = False

    async def swap(self, version: int, mode: Interrupt) -> None:
        """Have the server use ``version``, and report it."""
        asked_s = self._clock.now()
        self._begin_holding(later_only=mode is Interrupt.BATCH)
        if mode in _PATIENT:
            await self._until(lambda: not self._running)
        began_s = self._clock.now()
        await self._wake()
        if mode in _BY_ABORT:
            self._going.clear()
        recompute = mode is Interrupt.INFLIGHT_RECOMPUTE
        await self._dialect.hold(self._wire.client, PauseMode(abort=mode in _BY_ABORT, recompute=recompute))
        if mode in _BY_ABORT:
            await self._halt()
        there = list(self._running.values())
        handover = self._server.handover
        path, label = handover.path(version), self.labels.of(version)
        await self._dialect.load(self._wire.client, path, label, handover.form.folders)
        self.adopt(version)
        restarted = there if mode is Interrupt.ABORT_RETRY else []
        wasted = sum(answer.restart() for answer in restarted)
        await self._dialect.go_on(self._wire.client)
        self._going.set()
        handover.drop_before(version)
        ended_s = self._clock.now()
        self._end_holding()
        self._count(restarted=self.stats.restarted + len(restarted), wasted_tokens=self.stats.wasted_tokens + wasted)
        forgotten = recompute or mode in _RESUMES
        self._outbox.report(
            SwapReport(
                version=version,
                gap_s=ended_s - began_s,
                carried_over=len(there) - len(restarted),
                restarted=len(restarted),
                mode=mode,
                waited_s=began_s - asked_s,
                wasted_tokens=wasted,
                recomputed_tokens=sum(len(one.prompt) + len(one.ids) for one in there) if forgotten else 0,
            )
        )

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _queue(self, answer: StreamedAnswer) -> None:
        if self._held is None:
            heapq.heappush(self._waiting, (answer.key, answer))
        else:
            self._held.append(answer)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._terms.most:
            _, answer = heapq.heappop(self._waiting)
            request_id = answer.request.request_id
            if self._known.get(request_id) is not answer:  # withdrawn meanwhile
                continue
            if not self._running:
                self._busy_since_s = self._heard_s = self._clock.now()
            self._running[request_id] = answer
            answer.task = self._wire.spawn(self._run(answer))
        self._count()

    def _leave(self, answer: StreamedAnswer) -> None:
        request_id = answer.request.request_id
        self._known.pop(request_id, None)
        if self._running.pop(request_id, None) is not None and not self._running:
            self._count(busy_s=self.stats.busy_s + self._clock.now() - self._busy_since_s)
        self._changed.set()

    def _late(self, answer: StreamedAnswer) -> None:
        request_id = answer.request.request_id
        if self._known.get(request_id) is answer:
            for chunk in self.withdraw([request_id], StopReason.DEADLINE):
                self._outbox.put(chunk)

    def _begin_holding(self, *, later_only: bool = False) -> None:
        if self._held is None:
            self._held = []
        if not later_only:
            self._held += [answer for _, answer in self._waiting]
            self._waiting = []

    def _end_holding(self) -> None:
        held, self._held = self._held or [], None
        for answer in held:
            self._queue(answer)
        self._admit()

    async def _halt(self) -> None:
        """Every stream has ended or been told to; those without a token yet may not have reached the server, so they
        are asked for again."""
        for answer in list(self._running.values()):
            if not answer.halted and len(answer.ids) == answer.stream_begin:
                assert answer.task is not None
                answer.task.cancel()
                del self._running[answer.request.request_id]
                self._queue(answer)
        try:
            async with asyncio.timeout(HALT_S):
                await self._until(lambda: all(answer.halted for answer in self._running.values()))
        except TimeoutError:
            raise ComponentDied(
                f"{self._dialect.name} stands still, and has not ended its streams for {HALT_S:g} s",
                remedy="look at its log; another sync.interrupt does not need it",
            ) from None

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self._changed.clear()
            await self._changed.wait()

    # -- one answer ---------------------------------------------------------------------------------------------------

    async def _run(self, answer: StreamedAnswer) -> None:
        try:
            while (ended := await self._stream(answer)) == ABORT:
                if self._going.is_set():
                    raise SequenceFailed(
                        f"{self._dialect.name} withdrew request {answer.request.request_id}", remedy="look at its log"
                    )
                answer.halted = True
                self._changed.set()
                await self._going.wait()
                answer.halted = False
        except RequestError as error:
            self._outbox.put(answer.chunk(error=error))
        else:
            self._outbox.put(answer.chunk(_REASONS[ended]))
        self._leave(answer)
        self._admit()

    async def _stream(self, answer: StreamedAnswer) -> str:
        """Until the server ends it; why it did."""
        import httpx

        answer.stream_begin = len(answer.ids)
        ask = Ask(
            ids=[*answer.prompt, *answer.ids],
            sampling=answer.request.sampling,
            left=answer.request.sampling.max_new_tokens - len(answer.ids),
            label=self.labels.of(self._version),
            masks=self._terms.masks,
            adapter=self._server.handover.form.adapters[answer.request.agent],
        )
        try:
            async with self._wire.client.stream(
                "POST", self._dialect.stream_path, json=self._dialect.body(ask)
            ) as reply:
                if reply.status_code != 200:
                    raise await self._refusal(reply)
                return await self._listen(answer, reply)
        except httpx.HTTPError as error:
            await self._server.refuse_dead(self._wire.client)
            raise SequenceFailed(
                f"{self._dialect.name} broke off an answer: {type(error).__name__}: {error}", remedy="look at its log"
            ) from None

    async def _refusal(self, reply: httpx.Response) -> RequestError:
        """What a reply says that is no stream. Raises :class:`~headrace.base.errors.ComponentDied` where nobody is
        there."""
        status, body = reply.status_code, (await reply.aread())[:500]
        if status not in _OF_REQUESTS:
            await self._server.refuse_dead(self._wire.client)
        problem = f"{self._dialect.name} answered {status}: {body.decode('utf-8', 'replace')}"
        if status in (429, 503):
            return EngineFull(problem, remedy="ask for less at once")
        return RequestError(problem, remedy="look at the request, and at the server's log")

    async def _listen(self, answer: StreamedAnswer, reply: httpx.Response) -> str:
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            try:
                part = self._dialect.part(line.removeprefix("data: "), len(answer.ids) - answer.stream_begin)
                if part is None:
                    continue
                spans = self._versions(part)
                self._take(answer, part)
                if spans is not None:
                    answer.certify(spans)
                if part.ended in _REASONS and answer.request.sampling.record_routing:
                    answer.experts_NLK = self._experts(answer, part)
            except ValueError as error:
                raise SequenceFailed(
                    f"{self._dialect.name} sent what is no part of an answer: {type(error).__name__}: {error}",
                    remedy="is it of a version that was tested? look at its log",
                ) from None
            if part.ended:
                return part.ended
        raise SequenceFailed(f"{self._dialect.name} ended an answer without a reason", remedy="look at its log")

    def _versions(self, part: StreamPart) -> list[tuple[int, int]] | None:
        """Of the stream that ends with ``part``, and how many tokens each has sampled; ``None`` where that is not said.
        Raises :class:`~headrace.base.errors.ComponentDied` for weights that this run has not given the server."""
        try:
            if part.label is not None:
                self.labels.version(part.label)
            if part.spans is None:
                return None
            return [(self.labels.version(span.version), max(0, span.end - span.start)) for span in part.spans]
        except ComponentDied:
            self._forget()  # since when it had them is not known
            raise

    def _forget(self) -> None:
        """Nothing that runs is believed any more, nor what comes of it."""
        for answer in self._running.values():
            answer.restart()
            self._outbox.put(answer.chunk())
            if answer.task is not None and answer.task is not asyncio.current_task():
                answer.task.cancel()

    def _take(self, answer: StreamedAnswer, part: StreamPart) -> None:
        if len(part.ids) != len(part.logprobs):
            raise ValueError(f"{len(part.logprobs)} logprobs for {len(part.ids)} tokens")
        if max(part.ids, default=0) >= self._terms.vocab_size:
            raise ValueError(f"token {max(part.ids)}, outside the vocabulary of {self._terms.vocab_size}")
        if part.ended not in _ENDS:
            raise ValueError(f"an end for the reason {part.ended!r}")
        sampling = answer.request.sampling
        if len(answer.ids) + len(part.ids) > sampling.max_new_tokens:
            raise ValueError(f"more than {sampling.max_new_tokens} tokens")
        if sampling.record_kept and part.ids:
            if part.kept is None:
                raise self._server.silent("kept-sets")
            refuse_kept(part.kept, part.ids, self._terms.vocab_size)
        first = answer.stream_begin == len(answer.ids)
        answer.take(part, self._version)
        self._heard_s = self._clock.now()
        self._count(
            generated_tokens=self.stats.generated_tokens + len(part.ids),
            prompt_tokens=self.stats.prompt_tokens + (len(answer.prompt) + answer.stream_begin if first else 0),
            steps=self.stats.steps + 1,
        )
        due = len(answer.ids) - answer.flushed >= self._terms.flush_tokens
        if due and not part.ended and not sampling.record_routing:  # experts are told at the end
            self._outbox.put(answer.chunk())

    def _experts(self, answer: StreamedAnswer, part: StreamPart) -> Experts:
        assert self._terms.routes is not None
        if part.experts is None:
            raise self._server.silent("experts")
        return self._terms.routes.of(part.experts, len(answer.prompt) + len(answer.ids) - 1)

    async def _watch(self) -> None:
        """A server that is dead is noticed, whatever it leaves open."""
        for _ in itertools.count():
            await asyncio.sleep(WATCH_S)
            silent_s = self._clock.now() - self._heard_s
            asked = silent_s >= WATCH_S and bool(self._running) and self._held is None
            await self._server.refuse_dead(self._wire.client, ask=asked)

    def _count(self, **changed: float) -> None:
        waiting = len(self._known) - len(self._running)
        self.stats = msgspec.structs.replace(
            self.stats, running=len(self._running), waiting=waiting, **changed
        )  # fmt: skip
