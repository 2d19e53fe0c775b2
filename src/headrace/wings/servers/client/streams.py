"""The asynchronous part of a served engine, which runs in the event loop of the wire (the connections to the server):
one task for each answer, and the commits of new weights. A stream is one streamed HTTP response of the server.

queue ──at most max_streams──▶ stream ──stop, length──▶ ended
  ▲                            │ ▲
  └── held back by a commit ───┘ └── halted by a commit that ends streams; then continued, or sampled again
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, EngineFull, RequestError, SequenceFailed
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.recorded import Experts
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport
from headrace.wings.servers.client.answer import StreamedAnswer, StreamPart
from headrace.wings.servers.client.dialect import PauseMode, ServerDialect, StreamRequest
from headrace.wings.servers.client.ownership import Labels
from headrace.wings.servers.client.records import RoutingDecoder, refuse_kept
from headrace.wings.servers.client.server import Server
from headrace.wings.servers.client.wire import Wire

if TYPE_CHECKING:
    import httpx

ABORT = "abort"
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
_ENDS = frozenset({"", ABORT, *_REASONS})
_REQUEST_ERRORS = frozenset({400, 413, 422, 429, 503})
"""HTTP statuses that are caused by the request. After any other error status the server's health is checked."""
_KEEPS_ANSWERS = frozenset({Interrupt.ABORT_RESUME, Interrupt.SLEEP})
_BY_ABORT = _KEEPS_ANSWERS | {Interrupt.ABORT_RETRY}
_WAITS_FOR_ANSWERS = frozenset({Interrupt.DRAIN, Interrupt.BATCH})
HALT_S = 30.0
"""Longest time in seconds for a paused server to end its streams."""
WATCH_S = 5.0
"""Seconds without a token after which the health of a server with open streams is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLimits:
    """The limits of all requests to a served engine, and the kinds of records that the server reports for each
    token."""

    vocab_size: int
    """Number of token ids; ids run from 0 to one below it."""
    max_context: int
    """Largest number of tokens of a prompt and its answer together."""
    record_kept: bool = False
    """Whether the server reports the kept-set of each token."""
    routing: RoutingDecoder | None = None
    """Decoder of the experts of each token; ``None`` if the server does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The settings of the streams of one server."""

    max_streams: int
    """Largest number of streams at once."""
    flush_tokens: int
    """Number of new tokens at which a chunk is sent to the reader."""
    limits: ServedLimits
    """The limits of all requests, and the kinds of records of each token."""
    trained: bool = False
    """Whether this run trains the server's weights, so that no other run may load weights into the server."""


class AnswerStreams:
    """The streams of one server, the queue of answers that wait for a stream, and the commits of new weights. Every
    method must be called in the event loop of the wire."""

    def __init__(self, wire: Wire, server: Server, chunk_queue: ChunkQueue, config: StreamConfig, clock: Clock) -> None:
        """Create the object for ``server``, which is reached through ``wire``, and start to watch the server. Chunks
        and commit reports are put into ``chunk_queue``."""
        self._wire, self._server, self._chunk_queue = wire, server, chunk_queue
        self._config, self._clock = config, clock
        self._dialect: ServerDialect = server.dialect
        self._waiting: list[tuple[tuple[int, int], StreamedAnswer]] = []
        """Heap of the answers that wait for a free stream, each with its sort key."""
        self._held_back_answers: list[StreamedAnswer] | None = None
        """Answers that wait while admission is stopped; ``None`` while answers are admitted."""
        self._running: dict[int, StreamedAnswer] = {}
        """The answers that have a stream, by request id."""
        self._answers_by_id: dict[int, StreamedAnswer] = {}
        """All answers that have not ended, by request id."""
        self._resumed = asyncio.Event()
        """Set while the server is not paused for a commit or by :meth:`sleep`."""
        self._resumed.set()
        self._changed = asyncio.Event()
        """Set whenever an answer ends or is halted."""
        self.labels = Labels(str(server), None if config.trained else "")
        self._version = NOT_SAMPLED
        """The version of the weights that the server uses now."""
        self._is_asleep = False
        """Whether the server has released its memory."""
        self._busy_since_s = 0.0
        """Time at which the first of the running answers started."""
        self._last_token_s = clock.now()
        """Time at which the newest token arrived or the server became busy."""
        self.stats = EngineStats()
        """The engine's counters. Each change replaces the immutable record, so any thread may read it."""
        self._watching = wire.start_task(self._watch())
        """The task that watches the server's health."""

    def adopt(self, version: int) -> None:
        """Record that the server uses the weights of ``version``; tokens that arrive from now on are stamped with
        it."""
        self._version = version
        self._update_stats(version=version)

    def add(self, answer: StreamedAnswer) -> None:
        """Queue an answer, which is streamed as soon as a stream is free. If its request has a deadline, the answer is
        ended at the deadline."""
        self._answers_by_id[answer.request.request_id] = answer
        deadline_s = answer.request.deadline_s
        if deadline_s is not None:
            asyncio.get_running_loop().call_later(deadline_s, self._expire, answer)
        self._queue(answer)
        self._admit()

    def withdraw(self, request_ids: Sequence[int], reason: StopReason) -> list[TokenChunk]:
        """End the answers to ``request_ids`` for ``reason``, and return their last chunks; unknown ids are ignored."""
        known = [self._answers_by_id[one] for one in dict.fromkeys(request_ids) if one in self._answers_by_id]
        for answer in known:
            self._remove(answer)
            if answer.task is not None:
                answer.task.cancel()
        self._admit()
        return [answer.chunk(reason) for answer in known]

    async def pause(self) -> None:
        """Pause the server until :meth:`resume`; running answers stay in the server."""
        self._stop_admitting()
        await self._dialect.pause(self._wire.client, PauseMode())

    async def sleep(self) -> None:
        """Pause the server until :meth:`resume`, end its streams, and make it release its memory."""
        self._stop_admitting()
        self._resumed.clear()
        await self._dialect.pause(self._wire.client, PauseMode(abort=True))
        await self._wait_until_halted()
        await self._dialect.sleep(self._wire.client)
        self._is_asleep = True

    async def resume(self) -> None:
        """Make the server continue to generate, and admit answers again."""
        await self._wake()
        await self._dialect.resume(self._wire.client)
        self._resumed.set()
        self._start_admitting()

    async def _wake(self) -> None:
        """Make the server allocate its memory again, if it has released its memory."""
        if self._is_asleep:
            await self._dialect.wake(self._wire.client)
            self._is_asleep = False

    async def swap(self, version: int, mode: Interrupt) -> None:
        """Make the server load ``version``, and queue the report of the commit. ``mode`` decides what happens to
        running answers: they stay in the server, are ended and continued, are sampled again from the start, or finish
        before the load."""
        ordered_s = self._clock.now()
        self._stop_admitting(later_only=mode is Interrupt.BATCH)
        if mode in _WAITS_FOR_ANSWERS:
            await self._wait_for(lambda: not self._running)
        began_s = self._clock.now()
        await self._wake()
        if mode in _BY_ABORT:
            self._resumed.clear()
        recompute = mode is Interrupt.INFLIGHT_RECOMPUTE
        await self._dialect.pause(self._wire.client, PauseMode(abort=mode in _BY_ABORT, recompute=recompute))
        if mode in _BY_ABORT:
            await self._wait_until_halted()
        running = list(self._running.values())
        handover = self._server.handover
        path, label = handover.path(version), self.labels.make(version)
        await self._dialect.load(self._wire.client, path, label, handover.form.folders)
        self.adopt(version)
        restarted = running if mode is Interrupt.ABORT_RETRY else []
        wasted = sum(answer.restart() for answer in restarted)
        await self._dialect.resume(self._wire.client)
        self._resumed.set()
        handover.drop_before(version)
        ended_s = self._clock.now()
        self._start_admitting()
        self._update_stats(
            restarted=self.stats.restarted + len(restarted), wasted_tokens=self.stats.wasted_tokens + wasted
        )
        forgotten = recompute or mode in _KEEPS_ANSWERS
        self._chunk_queue.report(
            SwapReport(
                version=version,
                gap_s=ended_s - began_s,
                carried_over=len(running) - len(restarted),
                restarted=len(restarted),
                mode=mode,
                waited_s=began_s - ordered_s,
                wasted_tokens=wasted,
                recomputed_tokens=sum(len(one.prompt) + len(one.ids) for one in running) if forgotten else 0,
            )
        )

    # -- the queue ----------------------------------------------------------------------------------------------------

    def _queue(self, answer: StreamedAnswer) -> None:
        """Add an answer to the queue of waiting answers or, while admission is stopped, to the answers that are held
        back."""
        if self._held_back_answers is None:
            heapq.heappush(self._waiting, (answer.key, answer))
        else:
            self._held_back_answers.append(answer)

    def _admit(self) -> None:
        """Start the streams of waiting answers in the order of their priority, until ``max_streams`` run."""
        while self._waiting and len(self._running) < self._config.max_streams:
            _, answer = heapq.heappop(self._waiting)
            request_id = answer.request.request_id
            if self._answers_by_id.get(request_id) is not answer:  # it was withdrawn while it waited
                continue
            if not self._running:
                self._busy_since_s = self._last_token_s = self._clock.now()
            self._running[request_id] = answer
            answer.task = self._wire.start_task(self._run(answer))
        self._update_stats()

    def _remove(self, answer: StreamedAnswer) -> None:
        """Remove an answer that has ended. If no answer runs any more, add the elapsed busy time to the counters."""
        request_id = answer.request.request_id
        self._answers_by_id.pop(request_id, None)
        if self._running.pop(request_id, None) is not None and not self._running:
            self._update_stats(busy_s=self.stats.busy_s + self._clock.now() - self._busy_since_s)
        self._changed.set()

    def _expire(self, answer: StreamedAnswer) -> None:
        """End an answer whose deadline has passed, unless it has ended already."""
        request_id = answer.request.request_id
        if self._answers_by_id.get(request_id) is answer:
            for chunk in self.withdraw([request_id], StopReason.DEADLINE):
                self._chunk_queue.put(chunk)

    def _stop_admitting(self, *, later_only: bool = False) -> None:
        """Stop admission until :meth:`_start_admitting`: hold back new answers and, unless ``later_only`` is set, the
        answers that wait already."""
        if self._held_back_answers is None:
            self._held_back_answers = []
        if not later_only:
            self._held_back_answers += [answer for _, answer in self._waiting]
            self._waiting = []

    def _start_admitting(self) -> None:
        """Queue the answers that were held back, and start as many as ``max_streams`` allows."""
        held, self._held_back_answers = self._held_back_answers or [], None
        for answer in held:
            self._queue(answer)
        self._admit()

    async def _wait_until_halted(self) -> None:
        """Wait until the paused server has ended every stream. An answer whose stream has received no token is
        cancelled and queued again instead, since its request may not have reached the server. Raises
        :class:`~headrace.base.errors.ComponentDied` after :data:`HALT_S`."""
        for answer in list(self._running.values()):
            if not answer.halted and len(answer.ids) == answer.stream_start:
                assert answer.task is not None
                answer.task.cancel()
                del self._running[answer.request.request_id]
                self._queue(answer)
        try:
            async with asyncio.timeout(HALT_S):
                await self._wait_for(lambda: all(answer.halted for answer in self._running.values()))
        except TimeoutError:
            raise ComponentDied(
                f"{self._dialect.name} is paused, and has not ended its streams for {HALT_S:g} s",
                remedy="look at its log; another sync.interrupt does not need it",
            ) from None

    async def _wait_for(self, is_reached: Callable[[], bool]) -> None:
        """Wait until ``is_reached`` returns true; it is called again whenever an answer ends or is halted."""
        while not is_reached():
            self._changed.clear()
            await self._changed.wait()

    # -- one answer ---------------------------------------------------------------------------------------------------

    async def _run(self, answer: StreamedAnswer) -> None:
        """Stream one answer to its end; this is the body of its task. If the server ends the stream for a commit, wait
        until the server resumes, and request the rest of the answer in a new stream."""
        try:
            while (finish_reason := await self._stream(answer)) == ABORT:
                if self._resumed.is_set():
                    raise SequenceFailed(
                        f"{self._dialect.name} withdrew request {answer.request.request_id}", remedy="look at its log"
                    )
                answer.halted = True
                self._changed.set()
                await self._resumed.wait()
                answer.halted = False
        except RequestError as error:
            self._chunk_queue.put(answer.chunk(error=error))
        else:
            self._chunk_queue.put(answer.chunk(_REASONS[finish_reason]))
        self._remove(answer)
        self._admit()

    async def _stream(self, answer: StreamedAnswer) -> str:
        """Request the rest of one answer, read the stream until the server ends it, and return the server's reason for
        the end: ``stop``, ``length`` or ``abort``."""
        import httpx

        answer.stream_start = len(answer.ids)
        request = StreamRequest(
            ids=[*answer.prompt, *answer.ids],
            sampling=answer.request.sampling,
            max_new_tokens=answer.request.sampling.max_new_tokens - len(answer.ids),
            label=self.labels.make(self._version),
            record_kept=self._config.limits.record_kept,
            adapter=self._server.handover.form.adapters[answer.request.agent],
        )
        try:
            async with self._wire.client.stream(
                "POST", self._dialect.stream_path, json=self._dialect.body(request)
            ) as reply:
                if reply.status_code != 200:
                    raise await self._refusal(reply)
                return await self._read_stream(answer, reply)
        except httpx.HTTPError as error:
            await self._server.check_health(self._wire.client)
            raise SequenceFailed(
                f"{self._dialect.name} broke off an answer: {type(error).__name__}: {error}", remedy="look at its log"
            ) from None

    async def _refusal(self, reply: httpx.Response) -> RequestError:
        """Return the error for an HTTP response whose status is not 200. Raises
        :class:`~headrace.base.errors.ComponentDied` if the server is dead."""
        status, body = reply.status_code, (await reply.aread())[:500]
        if status not in _REQUEST_ERRORS:
            await self._server.check_health(self._wire.client)
        problem = f"{self._dialect.name} answered {status}: {body.decode('utf-8', 'replace')}"
        if status in (429, 503):
            return EngineFull(problem, remedy="ask for less at once")
        return RequestError(problem, remedy="look at the request, and at the server's log")

    async def _read_stream(self, answer: StreamedAnswer, reply: httpx.Response) -> str:
        """Append the events of one stream to the answer, and return the server's reason for the end of the stream.
        Raises :class:`~headrace.base.errors.SequenceFailed` for an event that is not valid, since the server is not
        trusted."""
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            try:
                part = self._dialect.part(line.removeprefix("data: "), len(answer.ids) - answer.stream_start)
                if part is None:
                    continue
                spans = self._versions(part)
                self._append(answer, part)
                if spans is not None:
                    answer.correct_versions(spans)
                if part.finish_reason in _REASONS and answer.request.sampling.record_routing:
                    answer.experts_NLK = self._experts(answer, part)
            except ValueError as error:
                raise SequenceFailed(
                    f"{self._dialect.name} sent something that is not part of an answer: "
                    f"{type(error).__name__}: {error}",
                    remedy="is it of a version that was tested? look at its log",
                ) from None
            if part.finish_reason:
                return part.finish_reason
        raise SequenceFailed(f"{self._dialect.name} ended an answer without a reason", remedy="look at its log")

    def _versions(self, part: StreamPart) -> list[tuple[int, int]] | None:
        """Return the versions of the stream that ends with ``part``, each with its number of tokens; ``None`` if
        ``part`` has no version spans. Raises :class:`~headrace.base.errors.ComponentDied` if the server has weights
        that this run did not load."""
        try:
            if part.label is not None:
                self.labels.parse(part.label)
            if part.spans is None:
                return None
            return [(self.labels.parse(span.version), max(0, span.end - span.start)) for span in part.spans]
        except ComponentDied:
            self._discard_running()  # the server may have had the other weights for any length of time
            raise

    def _discard_running(self) -> None:
        """Discard all running answers, whose version stamps may be wrong, and cancel their tasks."""
        for answer in self._running.values():
            answer.restart()
            self._chunk_queue.put(answer.chunk())
            if answer.task is not None and answer.task is not asyncio.current_task():
                answer.task.cancel()

    def _append(self, answer: StreamedAnswer, part: StreamPart) -> None:
        """Check the tokens of ``part`` and append them to the answer; queue a chunk for the reader if enough tokens are
        new. Raises ``ValueError`` for an invalid part."""
        if len(part.ids) != len(part.logprobs):
            raise ValueError(f"{len(part.logprobs)} logprobs for {len(part.ids)} tokens")
        if max(part.ids, default=0) >= self._config.limits.vocab_size:
            raise ValueError(f"token {max(part.ids)}, outside the vocabulary of {self._config.limits.vocab_size}")
        if part.finish_reason not in _ENDS:
            raise ValueError(f"finish reason {part.finish_reason!r}")
        sampling = answer.request.sampling
        if len(answer.ids) + len(part.ids) > sampling.max_new_tokens:
            raise ValueError(f"more than {sampling.max_new_tokens} tokens")
        if sampling.record_kept and part.ids:
            if part.kept is None:
                raise self._server.make_missing_record_error("kept-sets")
            refuse_kept(part.kept, part.ids, self._config.limits.vocab_size)
        first = answer.stream_start == len(answer.ids)
        answer.append(part, self._version)
        self._last_token_s = self._clock.now()
        self._update_stats(
            generated_tokens=self.stats.generated_tokens + len(part.ids),
            prompt_tokens=self.stats.prompt_tokens + (len(answer.prompt) + answer.stream_start if first else 0),
            steps=self.stats.steps + 1,
        )
        due = len(answer.ids) - answer.num_sent >= self._config.flush_tokens
        if due and not part.finish_reason and not sampling.record_routing:  # experts are reported at the end only
            self._chunk_queue.put(answer.chunk())

    def _experts(self, answer: StreamedAnswer, part: StreamPart) -> Experts:
        """Return the experts from the last event of an answer, checked against the model. Raises an error if the server
        has reported none."""
        assert self._config.limits.routing is not None
        if part.experts is None:
            raise self._server.make_missing_record_error("experts")
        return self._config.limits.routing.convert(part.experts, len(answer.prompt) + len(answer.ids) - 1)

    async def _watch(self) -> None:
        """Check every :data:`WATCH_S` seconds whether the server is alive, and raise an error if it is dead, even if
        its connections stay open. This is the body of a task that runs as long as the wire."""
        for _ in itertools.count():
            await asyncio.sleep(WATCH_S)
            silent_s = self._clock.now() - self._last_token_s
            is_silent = silent_s >= WATCH_S and bool(self._running) and self._held_back_answers is None
            await self._server.check_health(self._wire.client, probe=is_silent)

    def _update_stats(self, **changed: float) -> None:
        """Replace the engine's counters by a copy with the ``changed`` figures and the current numbers of running and
        waiting answers."""
        waiting = len(self._answers_by_id) - len(self._running)
        self.stats = msgspec.structs.replace(
            self.stats, running=len(self._running), waiting=waiting, **changed
        )  # fmt: skip


class ChunkQueue:
    """A queue that passes chunks of tokens and reports of commits from the event loop to the thread that steps the
    engine. The tokens of the open requests bound its size."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._chunks: deque[TokenChunk] = deque()
        """Chunks that the engine has not fetched yet."""
        self._swaps: deque[SwapReport] = deque()
        """Commit reports that the engine has not fetched yet."""
        self._filled = threading.Event()
        """Set when the queue receives a chunk or a report."""

    def put(self, chunk: TokenChunk) -> None:
        """Add a chunk for the reader of an answer."""
        self._chunks.append(chunk)
        self._filled.set()

    def report(self, swap: SwapReport) -> None:
        """Add the report of a commit that has ended."""
        self._swaps.append(swap)
        self._filled.set()

    @property
    def not_empty(self) -> bool:
        """Return whether the queue holds a chunk or a report."""
        return bool(self._chunks or self._swaps)

    def wait(self, timeout_s: float) -> None:
        """Wait until the queue holds a chunk or a report, for at most ``timeout_s`` seconds."""
        if not self.not_empty:
            self._filled.wait(timeout_s)
        self._filled.clear()

    def pop_all(self) -> list[TokenChunk]:
        """Remove and return all chunks."""
        return [self._chunks.popleft() for _ in range(len(self._chunks))]

    def pop_swaps(self) -> list[SwapReport]:
        """Remove and return all reports of commits."""
        return [self._swaps.popleft() for _ in range(len(self._swaps))]
