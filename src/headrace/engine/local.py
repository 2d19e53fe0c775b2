"""An engine in a thread of this process.

    event loop                              step-loop thread                       stager thread
    generate ─▶ orders of one turn ──────▶  between two steps: add, abort,         stage: verify an
    commit, score, pause, resume ────────▶  commit, score, pause, resume           update meanwhile
    streams, answers ◀── one callback ────  step: chunks

The thread owns the core: nothing else calls it but :meth:`EngineCore.stage`. It ends when the engine is closed or when
the core raises; then each waiting caller hears why, as :class:`~headrace.base.errors.ComponentDied`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, DeadlineError, EngineFull, HeadraceError, RequestError, WeightsError
from headrace.base.types.messages.controller import Chunk, EngineStats
from headrace.base.types.messages.engine import GenerateRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.base import PLAIN, EngineCore, RequestOptions, TokenChunk
from headrace.engine.chunks import generate_request, score_request, token_chunk

A = TypeVar("A")
IDLE_S = 0.5
"""How long an idle engine waits for orders at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTerms:
    """On which an engine is kept in a thread."""

    max_requests: int = 4096
    """Requests at once, waiting or running; one more raises :class:`~headrace.base.errors.EngineFull`."""
    deadline_s: float = 600.0
    """Longest wait for a stage, a commit, a score or another answer."""


@dataclass(slots=True, eq=False)
class _Stream:
    """What one request has produced and its reader has not taken. Bounded by the request's tokens: a restart throws
    away what is here."""

    chunks: deque[Chunk | HeadraceError] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, chunk: Chunk | HeadraceError) -> None:
        if isinstance(chunk, Chunk) and chunk.restarted:
            self.chunks.clear()
        self.chunks.append(chunk)
        self.arrived.set()

    async def get(self) -> Chunk | HeadraceError:
        while not self.chunks:
            self.arrived.clear()
            await self.arrived.wait()
        return self.chunks.popleft()


class LocalEngine:
    """The :class:`~headrace.engine.Engine` contract over ``core``, for use in one event loop::

    async with LocalEngine(core, clock=RealClock()) as engine:
        async for chunk in engine.generate(prompt_ids_T, Sampling(max_new_tokens=8)):
            ...
    """

    def __init__(
        self, core: EngineCore, *, clock: Clock, terms: LocalTerms | None = None, name: str = "engine"
    ) -> None:
        self.name = name
        self._core = core
        self._clock = clock
        self._terms = terms or LocalTerms()
        self._request_ids = itertools.count()
        self._streams: dict[int, _Stream | None] = {}  # None: its reader has left, the core may not know it yet
        self._unsent: list[GenerateRequest] = []
        self._answers: set[asyncio.Future[Any]] = set()
        self._commits: dict[int, asyncio.Future[SwapReport]] = {}
        self._stats = core.stats()
        self._death: ComponentDied | None = None
        self._dead = asyncio.Event()
        # the three below are shared with the thread
        self._orders: deque[Callable[[], list[Chunk]]] = deque()
        self._wake = threading.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self.name}-stage")
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._wake.set()
        self._die(ComponentDied(f"{self.name} was closed", remedy="keep it open while requests run"))
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._stager.shutdown, cancel_futures=True)

    @property
    def death(self) -> ComponentDied | None:
        """Why it can serve nothing any more; ``None`` while it can."""
        return self._death

    async def died(self) -> ComponentDied:
        """Wait for its end, closed or broken."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        if self._death is not None:
            raise self._death
        if len(self._streams) >= self._terms.max_requests:
            raise EngineFull(
                f"{self.name} has {len(self._streams)} requests waiting or running, as many as it takes",
                remedy="try again later, or raise max_requests",
            )
        request_id, stream = next(self._request_ids), _Stream()
        self._streams[request_id] = stream
        self._send_soon(generate_request(request_id, prompt_ids_T, sampling, options))
        ended = False
        try:
            while not ended:
                chunk = await stream.get()
                if isinstance(chunk, HeadraceError):
                    ended = True
                    raise chunk
                ended = chunk.stop_reason is not None or bool(chunk.error)
                yield token_chunk(chunk)
        finally:
            if not ended and request_id in self._streams:
                self._streams[request_id] = None
                self._flush()  # the core must have heard of it before it is withdrawn
                self._order(lambda: self._core.abort([request_id]))

    def withdraw_all(self) -> None:
        """Every request ends with what it has; its last chunk says :attr:`StopReason.ABORTED`."""
        self._flush()
        request_ids = list(self._streams)
        self._order(lambda: self._core.abort(request_ids))

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        request = score_request(0, tokens, temperature)
        return await self._call("score", lambda: self._core.score(request))

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        request = score_request(0, tokens, temperature, top_k=num, top_below=below)
        return await self._call("score", lambda: self._core.top_scores(request))

    async def stage(self, update: WeightUpdate) -> float:
        if self._death is not None:
            raise self._death
        start_s = self._clock.now()
        staged: asyncio.Future[None] = self._future()
        self._stager.submit(self._stage, update, staged)
        await self._in_time(f"stage version {update.version}", staged)
        return self._clock.now() - start_s

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        what = f"commit version {version}"
        if version in self._commits:
            raise WeightsError(
                f"{self.name}: commit of version {version}, which has been asked for already and has not ended",
                remedy="wait for its report",
            )
        report: asyncio.Future[SwapReport] = self._future()
        self._commits[version] = report
        try:
            await self._call(what, lambda: self._core.commit(version, mode))
            return await self._in_time(what, report)
        finally:
            del self._commits[version]

    async def pause(self, *, release: bool = False) -> None:
        await self._call("pause", lambda: self._core.pause(release=release))

    async def resume(self) -> None:
        await self._call("resume", self._core.resume)

    def stats(self) -> EngineStats:
        return self._stats

    # -- in the event loop ------------------------------------------------------------------------------------------

    def _send_soon(self, request: GenerateRequest) -> None:
        """All requests of one turn of the event loop are one order, so they join the batch together."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(request)

    def _flush(self) -> None:
        requests, self._unsent = self._unsent, []
        if requests:
            self._order(lambda: self._add(requests))

    def _order(self, order: Callable[[], list[Chunk]]) -> None:
        self._orders.append(order)
        self._wake.set()

    async def _call(self, what: str, ask: Callable[[], A]) -> A:
        """What ``ask`` returns or raises when the thread calls it between two steps."""
        if self._death is not None:
            raise self._death
        answer: asyncio.Future[A] = self._future()

        def order() -> list[Chunk]:
            try:
                result = ask()
            except HeadraceError as error:
                self._post(_fail, answer, error)
            else:
                self._post(_resolve, answer, result)
            return []

        self._order(order)
        return await self._in_time(what, answer)

    def _future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._answers.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._answers.discard(future)
        if not future.cancelled():
            future.exception()  # where whoever asked has left, asyncio need not tell the user

    async def _in_time(self, what: str, answer: asyncio.Future[A]) -> A:
        try:
            async with asyncio.timeout(self._terms.deadline_s):
                return await answer
        except TimeoutError:
            raise DeadlineError(
                f"{self.name} has not answered for {self._terms.deadline_s:g} s: {what}",
                remedy="a step, or what it waits for, takes longer than that: raise the deadline",
            ) from None

    def _deliver(self, chunks: Sequence[Chunk], swaps: Sequence[SwapReport]) -> None:
        for chunk in chunks:
            stream = self._streams.get(chunk.request_id)
            if chunk.stop_reason is not None or chunk.error:
                self._streams.pop(chunk.request_id, None)
            if stream is not None:
                stream.put(chunk)
        for report in swaps:
            waiting = self._commits.get(report.version)
            if waiting is not None:
                _resolve(waiting, report)

    def _refuse(self, request_id: int, error: HeadraceError) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.put(error)

    def _die(self, death: ComponentDied) -> None:
        if self._death is not None:
            return
        self._death = death
        self._dead.set()
        for request_id in list(self._streams):
            self._refuse(request_id, death)
        for future in list(self._answers):
            _fail(future, death)

    # -- in the threads ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever waits for it must hear of it
            words = f"{self.name} died in its step loop: {type(error).__name__}: {error}"
            death = ComponentDied(words, remedy="start it again; if it dies again, report this")
            death.__cause__ = error
            self._post(self._die, death)

    def _stage(self, update: WeightUpdate, staged: asyncio.Future[None]) -> None:
        try:
            self._core.stage(update)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever waits for it must hear of it
            self._post(_fail, staged, error)
        else:
            self._post(_resolve, staged, None)

    def _turn(self) -> None:
        """What has been ordered, one step, and what it gave."""
        if not (self._core.has_work() or self._orders):
            self._wake.wait(IDLE_S)  # a deadline may pass while it stands still
        self._wake.clear()
        chunks: list[Chunk] = []
        for _ in range(len(self._orders)):
            chunks += self._orders.popleft()()
        if self._core.has_work() and not self._closing:
            chunks += self._core.step()
        swaps = self._core.take_swaps()
        self._stats = self._core.stats()
        if chunks or swaps:
            self._post(self._deliver, chunks, swaps)

    def _add(self, requests: Sequence[GenerateRequest]) -> list[Chunk]:
        for request in requests:
            try:
                self._core.add(request)
            except RequestError as error:
                self._post(self._refuse, request.request_id, error)
        return []

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        """Call it in the event loop; where that has ended, nobody waits any more."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            self._closing = True


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
