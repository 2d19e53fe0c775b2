"""An engine in another process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from headrace.base.errors import ComponentDied
from headrace.base.types.messages.controller import Chunk, Chunks, Committed, EngineStats, Paused, ScoresAre, Staged
from headrace.base.types.messages.engine import Abort, Commit, Generate, GenerateRequest, Pause, Resume, Stage
from headrace.base.types.sampling import Sampling
from headrace.base.types.taught import TopScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.trace import Span
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.engine.chunks import generate_request, score_request, token_chunk
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.peer import Peer


class EngineClient(Peer):
    """The :class:`~headrace.engine.Engine` contract over a channel."""

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
        self._request_ids = itertools.count()
        self._streams: dict[int, asyncio.Queue[Chunk | Exception]] = {}
        self._unsent: list[GenerateRequest] = []
        self._stats = EngineStats()
        self._closed: ComponentDied | None = None

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self._refuse_closed()
        request_id = next(self._request_ids)
        stream: asyncio.Queue[Chunk | Exception] = asyncio.Queue(maxsize=sampling.max_new_tokens + 2)  # of a token each
        self._streams[request_id] = stream
        self._send_soon(generate_request(request_id, prompt_ids_T, sampling, options))
        ended = False
        try:
            while not ended:
                chunk = await stream.get()
                if isinstance(chunk, Exception):  # the engine has never heard of the request, or is no more
                    ended = True
                    raise chunk
                ended = chunk.stop_reason is not None or bool(chunk.error)
                yield token_chunk(chunk)
        finally:
            del self._streams[request_id]
            if not ended and self._closed is None:
                self.send(Abort(request_ids=(request_id,)))

    @property
    def weights_address(self) -> str:
        """Where a learner can send weights to; empty where the engine fetches them. Known when it is ready."""
        return str(self.ready.result().facts.get("weights_address", ""))

    async def stage(self, update: WeightUpdate) -> float:
        self._refuse_closed()
        call = self.next_call()
        staged = self.expect(call, Staged)
        self.send(Stage(call=call, update=update))
        return (await self.answer(staged, f"stage version {update.version}", self._deadline_s)).seconds

    async def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> SwapReport:
        self._refuse_closed()
        call = self.next_call()
        committed = self.expect(call, Committed)
        self.send(Commit(call=call, version=version, mode=mode))
        return (await self.answer(committed, f"commit version {version}", self._deadline_s)).report

    async def score(self, tokens: Tokens, *, temperature: float = 1.0) -> FloatColumn:
        self._refuse_closed()
        call = self.next_call()
        scored = self.expect(call, ScoresAre)
        self.send(score_request(call, tokens, temperature))
        return (await self.answer(scored, f"score {len(tokens)} tokens", self._deadline_s)).logprobs_T

    async def top_scores(self, tokens: Tokens, num: int, *, below: int = 0, temperature: float = 1.0) -> TopScores:
        self._refuse_closed()
        call = self.next_call()
        scored = self.expect(call, ScoresAre)
        self.send(score_request(call, tokens, temperature, top_k=num, top_below=below))
        found = await self.answer(scored, f"score {len(tokens)} tokens", self._deadline_s)
        nothing = np.zeros((len(tokens), 0), np.float32)
        return TopScores(
            logprobs_T=found.logprobs_T,
            ids_TK=nothing.astype(np.int32) if found.ids_TK is None else found.ids_TK,
            logs_TK=nothing if found.logs_TK is None else found.logs_TK,
        )

    async def pause(self, *, release: bool = False) -> None:
        self._refuse_closed()
        call = self.next_call()
        paused = self.expect(call, Paused)
        self.send(Pause(call=call, release=release))
        await self.answer(paused, "pause", self._deadline_s)

    async def resume(self) -> None:
        self._refuse_closed()
        call = self.next_call()
        resumed = self.expect(call, Paused)
        self.send(Resume(call=call))
        await self.answer(resumed, "resume", self._deadline_s)

    def stats(self) -> EngineStats:
        return self._stats

    def close(self) -> None:
        """Close the channel; whoever reads a stream, or waits for an answer, hears of it."""
        self._closed = ComponentDied(
            f"{self.name} has ended, or was closed", remedy=f"look at logs/{self.name}.log in the run directory"
        )
        for stream in self._streams.values():
            stream.put_nowait(self._closed)
        for answer in list(self._expected.values()):
            if not answer.done():
                answer.set_exception(self._closed)
        super().close()

    def handle(self, message: Any) -> None:
        if not isinstance(message, Chunks):
            super().handle(message)
            return
        self._stats = message.stats
        for chunk in message.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:  # its reader has left
                continue
            while chunk.restarted and not stream.empty():  # tokens that are to be forgotten
                stream.get_nowait()
            stream.put_nowait(chunk)

    def _refuse_closed(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _send_soon(self, request: GenerateRequest) -> None:
        """All requests of one turn of the event loop travel in one message, so they join the batch together."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(request)

    def _flush(self) -> None:
        requests, self._unsent = tuple(self._unsent), []
        if self._closed is not None:  # their readers have heard
            return
        try:
            self.send(Generate(requests=requests))
        except Exception as error:  # noqa: BLE001 - a callback of the event loop: whoever waits must hear of it
            for request in requests:
                if (stream := self._streams.get(request.request_id)) is not None:
                    stream.put_nowait(error)
