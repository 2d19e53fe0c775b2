"""The client of an engine that runs in another process or thread. The controller sends orders over a channel, and each
answer of the engine contains the number (``call``) of its order. The learner may *announce* a new version directly to
an engine on its own machine. The engine then stages the version, and may commit it, without an order from the
controller."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace.base.errors import ComponentDied, EngineFull, WeightsError
from headrace.base.types.episode import TokenChunk
from headrace.base.types.messages.controller import (
    Chunks,
    Committed,
    EngineStats,
    Paused,
    ScoresReply,
    Staged,
    StageOutcome,
)
from headrace.base.types.messages.engine import (
    ANNOUNCED,
    Abort,
    Commit,
    Generate,
    GenerateRequest,
    Pause,
    Resume,
    ScoreTokens,
    Stage,
)
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.trace import Span
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions
from headrace.engine.base import OnSiblingChunks, SiblingRequest
from headrace.launch.channel import OrdersEnd
from headrace.launch.clients.peer import Peer, make_error
from headrace.launch.clients.streams import RequestStream, SiblingArrivals, SiblingStream

A = TypeVar("A")
R = TypeVar("R", StageOutcome, Committed)


class EngineClient(Peer):
    """The client of one engine, which implements the :class:`~headrace.engine.Engine` contract over a channel.

    ``deadline_s`` is the longest time to wait for the answer to one order, in seconds. Requests are refused if
    ``max_requests`` requests are waiting or running.
    """

    deadline_setting = "sync.deadline_s"
    """The setting that extends ``deadline_s``."""

    def __init__(
        self,
        name: str,
        channel: OrdersEnd,
        *,
        token: str,
        on_spans: Callable[[Sequence[Span]], None],
        deadline_s: float,
        max_requests: int = sys.maxsize,
        first_request: int = 0,
        answers_to: str = "",
    ) -> None:
        """Create the client of the engine process ``name`` over ``channel``. The class describes ``deadline_s`` and
        ``max_requests``, and :class:`Peer` describes ``token`` and ``on_spans``. In a process other than the
        controller, requests are numbered from ``first_request``, so that no two clients of an engine use the same
        number, and the engine sends their chunks to the address ``answers_to``."""
        super().__init__(name, channel, token=token, on_spans=on_spans)
        self._deadline_s = deadline_s
        self._max_requests = max_requests
        self._committing: set[int] = set()
        """The versions whose commit was ordered and is not answered."""
        self._request_ids = itertools.count(first_request)
        """The numbers of the requests that will be sent."""
        self._answers_to = answers_to
        self._streams: dict[int, RequestStream | SiblingStream] = {}
        """The stream of each running request, by its number."""
        self._unsent: list[GenerateRequest] = []
        """The requests that are sent at the end of this iteration of the event loop."""
        self._stats = EngineStats()
        """The latest counters that the engine has sent."""
        self._stage_outcome: StageOutcome | None = None
        """The outcome of staging the newest version that the learner has announced to the engine."""
        self._committed: Committed | None = None
        """The report of the newest version that the engine has committed because of an announcement."""
        self._announced_reports: dict[tuple[int, type], asyncio.Future[Any]] = {}
        """The futures of reports about announced versions, by version and message type."""
        self._closed: ComponentDied | None = None
        """The error with which this client has ended; ``None`` while it can be used."""

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Send a request to the engine, and yield the chunks of its answer. If the caller stops reading early, the
        request is aborted. Raises :class:`~headrace.base.errors.EngineFull` if ``max_requests`` requests are waiting or
        running, and :class:`~headrace.base.errors.ComponentDied` if the engine dies."""
        self._refuse_overload(1)
        request_id = next(self._request_ids)
        stream = self._streams[request_id] = RequestStream(sampling.max_new_tokens)
        self._send_soon(GenerateRequest.create(request_id, prompt_ids_T, sampling, options))
        ended = False
        try:
            while not ended:
                chunk = await stream.next()
                if isinstance(chunk, Exception):  # the request was not sent, or the engine has died
                    ended = True
                    raise chunk
                ended = chunk.ended
                chunk.raise_error()
                yield chunk
        finally:
            del self._streams[request_id]
            if not ended and self._closed is None:
                self.send(Abort(request_ids=(request_id,)))

    async def generate_siblings(
        self, prompt_ids_T: IntColumn, siblings: Sequence[SiblingRequest], on_chunks: OnSiblingChunks
    ) -> None:
        """Send several requests with the same prompt to the engine, and pass the chunks of their answers to
        ``on_chunks``; see :class:`~headrace.engine.SiblingSource`. Raises the same errors as :meth:`generate`. If the
        client cannot accept all of the requests, none is sent."""
        self._refuse_overload(len(siblings))
        arrivals = SiblingArrivals()
        request_ids = [next(self._request_ids) for _ in siblings]
        for index, (request_id, sibling) in enumerate(zip(request_ids, siblings, strict=True)):
            self._streams[request_id] = SiblingStream(arrivals, index)
            self._send_soon(GenerateRequest.create(request_id, prompt_ids_T, sibling.sampling, sibling.options))
        running = set(range(len(siblings)))
        try:
            while running:
                arrived = await arrivals.next()
                running.difference_update([index for index, chunk in arrived if chunk.ended])
                await on_chunks(arrived)
        finally:
            for request_id in request_ids:
                del self._streams[request_id]
            if running and self._closed is None and arrivals.error is None:
                self.send(Abort(request_ids=tuple(request_ids[index] for index in sorted(running))))

    @property
    def weights_address(self) -> str:
        """The address at which the engine receives weights from a learner; empty if the engine fetches weights itself.
        It is available when the engine is ready."""
        return str(self.ready.result().facts.get("weights_address", ""))

    @property
    def orders_address(self) -> str:
        """The address at which other parts on this machine can send orders to the engine; empty for an engine on
        another machine."""
        return self._channel.local_orders

    async def stage(self, update: WeightUpdate) -> float:
        """Order the engine to stage a version, and return the seconds that this took. If the learner has announced the
        version to the engine, send no order and only wait for the engine's report."""
        self._refuse_closed()
        if self.orders_address in update.announced_to:
            return await self._wait_until_staged(update.version)
        order = Stage(call=self.next_call(), update=update)
        return (await self._execute(order, Staged, self._describe_staging(update.version))).seconds

    async def _execute(self, order: Stage | Commit | ScoreTokens | Pause | Resume, kind: type[A], operation: str) -> A:
        """Send ``order`` to the engine, and wait for its answer, which has the type ``kind``. ``operation`` names the
        order in an error."""
        self._refuse_closed()
        reply = self.expect(order.call, kind)
        self.send(order)
        return await self._answer(reply, operation)

    async def _answer(self, future: asyncio.Future[A], operation: str) -> A:
        """Wait for ``future``, an answer of the engine, as :meth:`Peer.answer` does, with the deadline of this client.
        ``operation`` names the order in an error."""
        return await self.answer(future, operation, self._deadline_s, setting=self.deadline_setting)

    def _describe_staging(self, version: int) -> str:
        """Return the name, for an error message, of the operation by which the engine stages ``version``. In a run, it
        shows that the learner has done its part."""
        return f"stage version {version}" + (", which the learner has published" if self.in_run else "")

    async def _wait_until_staged(self, version: int) -> float:
        """Wait until the engine has staged ``version``, which the learner has announced to it, and return the seconds
        that this took. Raises the error with which the engine refused the version."""
        outcome = self._stage_outcome
        if outcome is None or outcome.version != version:
            outcome = await self._wait_for_report(StageOutcome, self._describe_staging(version), version)
        if outcome.failure is not None:
            raise make_error(outcome.failure)
        return outcome.seconds

    async def _wait_for_report(self, kind: type[R], operation: str, version: int) -> R:
        """Wait for the report of type ``kind`` about ``version``, which the engine sends without an order from the
        controller, and return it. ``operation`` names the operation in the error if the report does not arrive in
        time."""
        future = self._announced_reports[version, kind] = self.expect(self.next_call(), kind)
        try:
            return await self._answer(future, operation)
        finally:
            del self._announced_reports[version, kind]

    def _store_report(self, message: StageOutcome | Committed) -> None:
        """Store a report that the engine has sent without an order, and wake the task that waits for it."""
        if isinstance(message, StageOutcome):
            version, self._stage_outcome = message.version, message
        else:
            version, self._committed = message.report.version, message
        future = self._announced_reports.get((version, type(message)))
        if future is not None and not future.done():
            future.set_result(message)

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        """Order the engine to commit a staged version, and return the engine's report. If the engine commits the
        version without an order, only wait for the report. ``mode`` says how running sequences continue. Raises
        :class:`~headrace.base.errors.WeightsError` while an earlier commit of this version is running."""
        self._refuse_closed()
        if version in self._committing:
            raise WeightsError(
                f"{self.name}: commit of version {version}, which has been asked for already and has not ended",
                remedy="wait for its report",
            )
        outcome, report_message = self._stage_outcome, self._committed
        if outcome is not None and outcome.version == version and outcome.commits:
            if report_message is None or report_message.report.version != version:
                report_message = await self._wait_for_report(Committed, f"commit version {version}", version)
            return report_message.report
        self._committing.add(version)
        try:
            order = Commit(call=self.next_call(), version=version, mode=mode)
            return (await self._execute(order, Committed, f"commit version {version}")).report
        finally:
            self._committing.discard(version)

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        """Return the logprob of each of ``tokens`` under the current weights of the engine, given the tokens before it.
        The value of the first token is 0. The engine divides its logits by ``temperature``."""
        order = ScoreTokens.create(self.next_call(), tokens, temperature)
        return (await self._execute(order, ScoresReply, f"score {len(tokens)} tokens")).logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        """Return the logprob of each of ``tokens`` and, for each position, the ``num`` most likely vocabulary entries
        with their logprobs. The values of the first token are 0. ``below`` restricts the entries to ids less than it; 0
        means no restriction. The engine divides its logits by ``temperature``."""
        order = ScoreTokens.create(self.next_call(), tokens, temperature, top_k=num, top_below=below)
        scores = await self._execute(order, ScoresReply, f"score {len(tokens)} tokens")
        empty = np.zeros((len(tokens), 0), np.float32)
        return TopScores(
            logprobs_T=scores.logprobs_T,
            ids_TK=empty.astype(np.int32) if scores.ids_TK is None else scores.ids_TK,
            logs_TK=empty if scores.logs_TK is None else scores.logs_TK,
        )

    async def pause(self, *, release: bool = False) -> None:
        """Pause the engine between two steps. With ``release``, the engine also frees the memory of its cache."""
        await self._execute(Pause(call=self.next_call(), release=release), Paused, "pause")

    async def resume(self) -> None:
        """Let a paused engine continue."""
        await self._execute(Resume(call=self.next_call()), Paused, "resume")

    def stats(self) -> EngineStats:
        """Return the latest counters that the engine has sent."""
        return self._stats

    def last_report(self) -> str:
        """Return the weights, the steps and the sequences that the engine has reported last."""
        stats = self._stats
        weights = "no weights" if stats.version == NOT_SAMPLED else f"version {stats.version}"
        return f"it reported last: {weights} in use, {stats.steps} steps made, {stats.running} sequences running"

    def close(self) -> None:
        """Close the channel, because the engine's process has ended. Tasks that read a stream or wait for an answer
        receive a :class:`~headrace.base.errors.ComponentDied`."""
        self.end(
            ComponentDied(
                f"{self.name} has ended, or was closed", remedy=f"look at logs/{self.name}.log in the run directory"
            )
        )
        super().close()

    def end(self, death: ComponentDied) -> None:
        """Make all waiting calls and streams, and every later call, fail with ``death``. Only the first call of this
        method has an effect."""
        if self._closed is not None:
            return
        self._closed = death
        for stream in self._streams.values():
            stream.fail(self._closed)
        for answer in list(self._expected.values()):
            if not answer.done():
                answer.set_exception(self._closed)

    def handle(self, message: Any) -> None:
        """Handle a message from the engine. Chunks are passed to the streams of their requests, and reports about
        announced versions are stored. When a sequence was restarted, its unread earlier tokens are discarded."""
        if isinstance(message, StageOutcome) or (isinstance(message, Committed) and message.call == ANNOUNCED):
            self._store_report(message)
            return
        if not isinstance(message, Chunks):
            super().handle(message)
            return
        self._stats = message.stats
        for chunk in message.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is not None:  # otherwise the caller has stopped reading
                stream.put(chunk)

    def _refuse_overload(self, num_requests: int) -> None:
        """Raise an error if ``num_requests`` more requests cannot be sent, because this client has ended or because the
        limit of requests would be exceeded."""
        self._refuse_closed()
        if len(self._streams) + num_requests > self._max_requests:
            raise EngineFull(
                f"{self.name} has {len(self._streams)} requests waiting or running, as many as it takes",
                remedy="try again later, or raise max_requests",
            )

    def _refuse_closed(self) -> None:
        """Raise the :class:`~headrace.base.errors.ComponentDied` with which this client has ended, if it has ended."""
        if self._closed is not None:
            raise self._closed

    def _send_soon(self, request: GenerateRequest) -> None:
        """Queue a request. All requests of one iteration of the event loop are sent in one message, so that they enter
        the same batch."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(request)

    def _flush(self) -> None:
        """Send the requests that were queued in this iteration of the event loop, in one message."""
        requests, self._unsent = tuple(self._unsent), []
        if not requests or self._closed is not None:  # the streams have received the error already
            return
        try:
            self.send(Generate(requests=requests, answers_to=self._answers_to))
        except Exception as error:  # noqa: BLE001 - the edge of a callback: the streams get the error
            for request in requests:
                if (stream := self._streams.get(request.request_id)) is not None:
                    stream.fail(error)
