"""An engine that samples through a server (vLLM, SGLang): an :class:`~headrace.engine.base.EngineCore` over the streams
of the server's API.

    step loop of the engine's process event loop of the wire (a thread)                  the server
    add, abort ─────────────────▶    queue ─ at most max_sequences ─▶ one stream each ─▶ samples
    step ◀── chunks that are due ──  tokens, stamped as they arrive ◀─────────────────── tokens
    stage (another thread): Receiver verifies, Handover writes a file beside the server
    commit ─────────────────────▶    admit none; pause; load the file; resume ────────▶  packs its kernels' weights
    take_swaps ◀── report ─────────  the spans at the end of a stream correct its stamps

A token is stamped with the version in use when it arrives. The weights are loaded between the server's answer to
*pause* and the request to *resume*, so a token of the old version usually arrives before the commit. If it arrives
later, the version spans at the end of the stream show the error, and the answer is sent to its reader again
(:meth:`.answer.StreamedAnswer.correct_versions`). If a server reports no spans, every stream is ended at the commit, so
that each stream has one version.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.base.clock import Clock
from headrace.base.errors import EngineFull, RequestError, WeightsError
from headrace.base.types.columns import FloatColumn
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.controller import EngineStats
from headrace.base.types.messages.engine import ForkRequest, GenerateRequest, ScoreTokens, StaleFork
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import Interrupt, SwapReport, WeightUpdate
from headrace.engine.config import EngineConfig
from headrace.engine.native.checks import check_ids, request_problem, score_problem
from headrace.sync.receiver import Receiver
from headrace.wings.servers.client.answer import StreamedAnswer
from headrace.wings.servers.client.dialect import ServerInfo
from headrace.wings.servers.client.server import Server
from headrace.wings.servers.client.streams import AnswerStreams, ChunkQueue, ServedLimits, StreamConfig
from headrace.wings.servers.client.wire import Wire

STEP_S = 0.005
"""Longest time in seconds that a step waits for tokens. Other calls to the engine are delayed by as much."""
CONTROL_S = 60.0
"""Longest wait for the server's answer to a control request (pause, withdrawal, score), in seconds."""


@dataclass(slots=True, kw_only=True)
class _ServedForkSource:
    """The tokens of a running or ended request, from which other requests may be forked."""

    prompt: list[int]
    """Token ids of the prompt."""
    ids: list[int]
    """Token ids of the answer that were sent to the reader."""
    version: int = NOT_SAMPLED
    """Version of the newest token; ``NOT_SAMPLED`` before the first."""

    def extend(self, chunk: TokenChunk) -> None:
        """Append the tokens of a chunk that is sent to the reader. If the chunk tells the reader to discard earlier
        tokens, drop the earlier tokens first."""
        if chunk.lost:
            self.ids.clear()
        self.ids.extend(chunk.tokens.ids_T.tolist())
        if len(chunk.tokens.versions_T):
            self.version = int(chunk.tokens.versions_T[-1])


class ServedEngine:
    """An engine that samples through a server. This class is the synchronous side, whose methods the step loop of the
    engine's process calls. :func:`headrace.wings.servers.client.make.open_served_engine` creates it. ``receiver``
    receives new weights from the learner; it is ``None`` if the weights never change."""

    def __init__(
        self,
        wire: Wire,
        server: Server,
        config: EngineConfig,
        *,
        info: ServerInfo,
        limits: ServedLimits,
        receiver: Receiver | None,
        clock: Clock,
    ) -> None:
        """Create the engine over a running server. ``info`` contains the facts that the server reports about itself,
        and ``limits`` the limits of requests."""
        self._wire, self._server, self._config, self._limits, self._receiver = wire, server, config, limits, receiver
        self._info = info
        self._name, self._capabilities = server.dialect.name, config.can
        self._chunk_queue = ChunkQueue()
        stream_config = StreamConfig(
            max_streams=config.max_sequences,
            flush_tokens=config.flush_tokens,
            limits=limits,
            trained=receiver is not None,
        )
        self._streams = wire.call(_make_streams(wire, server, self._chunk_queue, stream_config, clock), CONTROL_S)
        """The asynchronous side: the server's streams and commits."""
        self._arrivals = itertools.count()
        """Numbers the requests in the order of their arrival."""
        self._live: dict[int, _ServedForkSource] = {}
        """The tokens of running requests, by request id."""
        self._ended: OrderedDict[int, _ServedForkSource] = OrderedDict()
        """The tokens of the last ended requests, by request id, from which forks may continue."""
        self._loading_version: int | None = None
        """The version that a running commit loads; ``None`` if no commit runs."""
        self._version = NOT_SAMPLED
        """The version of the last commit whose report was taken."""
        self._paused = False

    def facts(self) -> dict[str, str | int | float]:
        """Return the server's version and address, for display."""
        return {"server": f"{self._name} {self._info.version}", "server_address": str(self._server.address)}

    def adopt(self, version: int) -> None:
        """Record that the server uses the weights of ``version``. These are the weights of its own model directory or,
        if adapters are trained, adapters that were written for it, which the server loads now."""
        self._wire.call(self._adopt(version), CONTROL_S)
        self._version = version

    def add(self, request: GenerateRequest) -> None:
        """Queue a request for the server. Raises :class:`~headrace.base.errors.RequestError` if the server cannot serve
        the request, and :class:`~headrace.base.errors.EngineFull` if too many requests wait."""
        name = f"request {request.request_id}"
        if problem := self._problem(request):
            raise RequestError(f"{name}: {problem}", remedy="correct it, or set engine.kind to 'native'")
        if self._streams.stats.waiting >= self._config.max_waiting:
            raise EngineFull(
                f"{name} would be one more than engine.max_waiting={self._config.max_waiting} that wait",
                remedy="ask again later, or raise engine.max_waiting",
            )
        prompt = self._prompt(request, name)
        if not prompt:
            raise RequestError(f"{name} has an empty prompt", remedy="give at least one token")
        if len(prompt) + request.sampling.max_new_tokens > self._limits.max_context:
            raise RequestError(
                f"{name}: prompt of {len(prompt)} tokens + max_new_tokens={request.sampling.max_new_tokens} "
                f"exceed max_context={self._limits.max_context}",
                remedy="shorten the prompt, lower max_new_tokens, or raise engine.max_context",
            )
        continued_ids = self._continued_answer_ids(request, name)
        answer = StreamedAnswer(request=request, prompt=prompt, arrival=next(self._arrivals), ids=list(continued_ids))
        answer.num_continued = answer.num_sent = len(continued_ids)
        answer.logprobs, answer.versions = [0.0] * len(continued_ids), [NOT_SAMPLED] * len(continued_ids)
        answer.kept = [()] * len(continued_ids)
        self._live[request.request_id] = _ServedForkSource(prompt=prompt, ids=continued_ids)
        self._wire.post(self._streams.add, answer)

    def abort(self, request_ids: Sequence[int]) -> list[TokenChunk]:
        """End the requests with these ids, and return their last chunks; unknown ids are ignored."""
        if self._wire.failure is not None:  # the next step returns earlier chunks, and then raises
            return []
        self._wire.call(self._withdraw(request_ids), CONTROL_S)
        return self._pop_chunks()

    def has_work(self) -> bool:
        """Return whether :meth:`step` should be called: a chunk, a commit's report or an error is available, or
        requests run."""
        if self._chunk_queue.not_empty or self._loading_version is not None or self._wire.failure is not None:
            return True
        return bool(self._live) and not self._paused

    def step(self) -> list[TokenChunk]:
        """Wait up to :data:`STEP_S` seconds for chunks of tokens from the server, and return the chunks that have
        arrived. If the connection is broken, raise its error once all earlier chunks were returned."""
        self._chunk_queue.wait(STEP_S)
        broken = self._wire.failure is not None
        chunks = self._pop_chunks()
        if broken and not chunks:  # chunks from before the failure are returned first
            self._refuse_broken()
        return chunks

    def score(self, request: ScoreTokens) -> FloatColumn:
        """Return the logprob of each of the given tokens, conditioned on the tokens before it; see
        :meth:`top_scores`."""
        return self.top_scores(request).logprobs_T

    def top_scores(self, request: ScoreTokens) -> TopScores:
        """Let the server compute the logprobs of given tokens, and the ``top_k`` likeliest tokens at each position.
        Raises :class:`~headrace.base.errors.RequestError` for a request that the server cannot compute exactly: with a
        temperature other than 1, with kept-sets, or with recorded experts."""
        self._refuse_broken()
        problem = score_problem(request, self._limits.vocab_size)
        if self._version == NOT_SAMPLED:
            problem = "they came before the first weights"
        elif request.temperature != 1 or request.kept is not None or request.routing is not None or request.top_below:
            problem = f"{self._name} scores at temperature 1 only, over the whole vocabulary, and routes live"
        elif len(request.ids_T) > self._limits.max_context - 1:
            problem = f"{len(request.ids_T)} tokens, and {self._name} takes {self._limits.max_context - 1}"
        if problem:
            raise RequestError(f"tokens to score: {problem}", remedy="score them with an engine of kind 'native'")
        if len(request.ids_T) < 2:
            empty = np.zeros((len(request.ids_T), request.top_k), np.float32)
            return TopScores(logprobs_T=np.zeros(len(empty), np.float32), ids_TK=empty.astype(np.int32), logs_TK=empty)
        ids = [int(token) for token in request.ids_T]
        return self._wire.call(self._scores(ids, request.top_k), CONTROL_S)

    def stage(self, update: WeightUpdate) -> None:
        """Receive a version from the learner, verify it, and write it to the folder from which the server will load it.
        The server continues to generate meanwhile."""
        if self._receiver is None:
            raise WeightsError(
                f"version {update.version} is sent to {self._name} with fixed weights", remedy="start it for training"
            )
        self._receiver.stage(update)
        self._server.handover.write(update.version, self._receiver.staged_tensors())

    def commit(self, version: int, mode: Interrupt = Interrupt.INFLIGHT) -> None:
        """Start the loading of the staged ``version`` in the server, without waiting for it; ``mode`` decides what
        happens to running answers, and :meth:`take_swaps` reports the end. Raises
        :class:`~headrace.base.errors.WeightsError` for a mode that the server does not support, and while another
        commit runs."""
        if mode not in self._capabilities.interrupts:
            raise WeightsError(
                f"{self._name} cannot commit with sync.interrupt={mode.value!r}",
                remedy=f"set it to {' or '.join(sorted(one.value for one in self._capabilities.interrupts))}",
            )
        if self._loading_version is not None or self._receiver is None:
            other = (
                f"version {self._loading_version} is still coming into use"
                if self._loading_version
                else "its weights are fixed"
            )
            raise WeightsError(f"commit of version {version}, and {other}", remedy="wait for the commit's report")
        self._receiver.commit(version)
        self._loading_version = version
        self._paused &= mode is not Interrupt.SLEEP
        self._wire.post(self._begin_swap, version, mode)

    def take_swaps(self) -> list[SwapReport]:
        """Remove and return the reports of commits that have ended, and record the version of the last of them as the
        engine's version."""
        swaps = self._chunk_queue.pop_swaps()
        if swaps:
            self._version, self._loading_version = swaps[-1].version, None
        return swaps

    def pause(self, *, release: bool = False) -> None:
        """Stop sampling until :meth:`resume`. With ``release``, the server also releases its memory; raises
        :class:`~headrace.base.errors.RequestError` if the server cannot release it."""
        if release and not self._capabilities.releases:
            raise RequestError(
                f"{self._name} cannot release its memory on {self._config.device}",
                remedy="pause without release, or set engine.kind to 'native'",
            )
        self._refuse_broken()
        self._wire.call(self._streams.sleep() if release else self._streams.pause(), CONTROL_S)
        self._paused = True

    def resume(self) -> None:
        """Continue sampling after :meth:`pause`."""
        self._refuse_broken()
        self._wire.call(self._streams.resume(), CONTROL_S)
        self._paused = False

    def stats(self) -> EngineStats:
        """Return the counters of the engine, such as running and waiting requests, tokens, and the version."""
        return self._streams.stats

    # -- checks of requests -------------------------------------------------------------------------------------------

    def _problem(self, request: GenerateRequest) -> str:
        """Return the reason why the server cannot answer ``request``; empty if it can."""
        sampling, dialect = request.sampling, self._server.dialect
        needs = {
            "kept-sets (record_kept)": sampling.record_kept and not self._limits.record_kept,
            "experts (record_routing)": sampling.record_routing and self._limits.routing is None,
            "entropies (record_entropy)": sampling.record_entropy and not self._capabilities.entropies,
            "likeliest entries (record_top)": sampling.record_top > 0,
            "structure of answers": bool(sampling.structure),
            "pinned sequences": request.pinned and not self._capabilities.pins,
            f"adapter of an agent {request.agent!r}": request.agent not in self._server.handover.form.adapters,
        }
        lacking = [what for what, is_needed in needs.items() if is_needed]
        if lacking:
            return f"{self._name} has no {', no '.join(lacking)}"
        if self._version == NOT_SAMPLED:
            return "it came before the first weights: its tokens would carry no version"
        if request.request_id in self._live:
            return "one of that id is already in the engine"
        continues = request.answer_ids_T is not None
        return request_problem(request, self._limits.vocab_size) or dialect.refusal(sampling, continues=continues)

    def _prompt(self, request: GenerateRequest, name: str) -> list[int]:
        """Return the token ids of the prompt; that of a fork is the prompt and the answer of its parent up to the fork.
        ``name`` is the request's in errors. Raises :class:`~headrace.base.errors.RequestError` for invalid tokens."""
        checked = check_ids("prompt", request.prompt_ids_T, self._limits.vocab_size)
        if checked.problem:
            raise RequestError(f"{name}: {checked.problem}", remedy="encode with the tokenizer of the engine's model")
        if request.fork is None:
            return [int(token) for token in checked.ids_T]
        past = self._find_fork_source(request.fork, name)
        if len(checked.ids_T):
            raise RequestError(
                f"{name} is a fork and has a prompt of its own", remedy="leave the prompt of a fork empty"
            )
        return [*past.prompt, *past.ids[: request.fork.at]]

    def _find_fork_source(self, fork: ForkRequest, name: str) -> _ServedForkSource:
        """Return the tokens of the running or recently ended request that ``fork`` continues; ``name`` is the name of
        the new request in errors. Raises :class:`~headrace.base.errors.RequestError` if there is no such request, or if
        it cannot be forked at that token."""
        past = self._live.get(fork.parent) or self._ended.get(fork.parent)
        if past is None:
            raise RequestError(
                f"{name} forks request {fork.parent}, which is neither running nor among the last "
                f"{self._config.fork_memory} that ended",
                remedy="raise engine.fork_memory, or send its tokens as a prompt",
            )
        if not 0 <= fork.at <= len(past.ids):
            raise RequestError(
                f"{name} forks request {fork.parent} at={fork.at}, but that one has sampled {len(past.ids)} tokens",
                remedy=f"set at to a number from 0 to {len(past.ids)}",
            )
        if fork.stale is StaleFork.REUSE and not self._capabilities.reuses_stale:
            raise RequestError(
                f"{name} is to share what older weights have computed, and {self._name} shares none of that",
                remedy="set stale to 'recompute' or 'refuse'",
            )
        if fork.stale is StaleFork.REFUSE and past.version not in (NOT_SAMPLED, self._version):
            raise RequestError(
                f"{name} forks request {fork.parent}, whose cache is not of version {self._version}, which is in use",
                remedy="set stale to 'recompute'",
            )
        return past

    def _continued_answer_ids(self, request: GenerateRequest, name: str) -> list[int]:
        """Return the tokens of an answer that another engine has begun and this engine continues; an empty list for a
        new answer. Raises :class:`~headrace.base.errors.RequestError` if the answer cannot be continued."""
        if request.answer_ids_T is None:
            return []
        checked = check_ids("answer", request.answer_ids_T, self._limits.vocab_size)
        problem = checked.problem
        if request.fork is not None:
            problem = "a fork has the answer of its parent, and none of its own"
        elif len(checked.ids_T) >= request.sampling.max_new_tokens:
            problem = f"an answer of {len(checked.ids_T)} tokens has reached its max_new_tokens"
        if problem:
            raise RequestError(f"{name}: {problem}", remedy="continue only what has not ended, with its own ids")
        return [int(token) for token in checked.ids_T]

    # -- results and commits ------------------------------------------------------------------------------------------

    def _pop_chunks(self) -> list[TokenChunk]:
        """Remove and return the chunks that have arrived. Keep the tokens of the last ``fork_memory`` ended requests,
        so that requests can be forked from them."""
        chunks = self._chunk_queue.pop_all()
        for chunk in chunks:
            self._live[chunk.request_id].extend(chunk)
            if chunk.ended:
                self._ended[chunk.request_id] = self._live.pop(chunk.request_id)
                self._ended.move_to_end(chunk.request_id)
                if len(self._ended) > self._config.fork_memory:
                    self._ended.popitem(last=False)
        return chunks

    def _refuse_broken(self) -> None:
        """Raise the error of the connection to the server, if the connection has ended."""
        if self._wire.failure is not None:
            raise self._wire.make_closed_error() from self._wire.failure

    def _begin_swap(self, version: int, mode: Interrupt) -> None:
        """Start the task in which the server loads ``version``; this method runs in the event loop."""
        self._swap = self._wire.start_task(self._streams.swap(version, mode))

    async def _scores(self, ids: Sequence[int], top_k: int) -> TopScores:
        """Request the scores of ``ids`` from the server, computed with the adapter of the policy."""
        adapter = self._server.handover.form.adapters[""]
        return await self._server.dialect.scores(self._wire.client, ids, top_k, adapter)

    async def _adopt(self, version: int) -> None:
        """If adapters are trained, let the server load the files of ``version``; otherwise only set the label of the
        weights that it already has."""
        handover, dialect, label = self._server.handover, self._server.dialect, self._streams.labels.make(version)
        if handover.form.adapters[""]:  # the server's model directory has no adapters
            await dialect.load(self._wire.client, handover.path(version), label, handover.form.folders)
        else:
            await dialect.name_weights(self._wire.client, label)
        self._streams.adopt(version)

    async def _withdraw(self, request_ids: Sequence[int]) -> None:
        """End the requests with these ids, and queue their last chunks; this method runs in the event loop."""
        for chunk in self._streams.withdraw(request_ids, StopReason.ABORTED):
            self._chunk_queue.put(chunk)


async def _make_streams(
    wire: Wire, server: Server, chunk_queue: ChunkQueue, stream_config: StreamConfig, clock: Clock
) -> AnswerStreams:
    """Create the streams of the server, in the event loop that owns them."""
    return AnswerStreams(wire, server, chunk_queue, stream_config, clock)
