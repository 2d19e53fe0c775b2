"""The engine's process: a plain synchronous step loop. Between two steps it reads its orders; staging has a thread.

A commit is answered when it has happened: some modes let sequences finish first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from headrace.base.clock import RealClock
from headrace.base.environ import run_token
from headrace.base.errors import ComponentDied, ConfigError, HeadraceError, ModelError, RequestError
from headrace.base.heap import settled_heap
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Chunk, Chunks, Committed, Failure, Paused, Ready, ScoresAre, Staged
from headrace.base.types.messages.engine import (
    Abort,
    Commit,
    Generate,
    GenerateRequest,
    Message,
    Pause,
    Resume,
    ScoreTokens,
    Stage,
)
from headrace.base.types.trace import Span
from headrace.engine import EngineConfig, EngineCore
from headrace.engine.native import NativeEngine
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.hosts.interleaving import DeliveryRecorder, Names, ReplayGate
from headrace.launch.interleaving import read_interleaving
from headrace.launch.lending import AnyCores, OwnCores, cores
from headrace.launch.starts import EngineStart, Repeated
from headrace.models.config import ModelConfig
from headrace.models.devices import use
from headrace.models.load import load_model, load_tokenizer
from headrace.models.weights import weight_tensors
from headrace.rollout.runner import episode_seed
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver

IDLE_S = 0.5
"""How long an idle engine waits for orders at a time."""
REPORT_S = 0.25
"""A busy engine reports its counters and spans at least this often."""


def run_engine(start: EngineStart, channel: PartChannel) -> None:
    """Load, report, serve until told to shut down."""
    torch.set_num_threads(start.num_threads)
    config = EngineConfig.model_validate(start.engine)
    if config.kind != "native":
        from headrace.launch.hosts.served import run_served

        run_served(start, config, channel)
        return
    device = use("engine.device", config.device)
    model = load_model(ModelConfig.model_validate(start.model), str(device))
    tensors = weight_tensors(model)
    route = Route(address=start.memory) if start.own_weights else start.route
    receiver = make_receiver(route, tensors, run_token())
    try:
        core = NativeEngine(
            model,
            config,
            max_context=start.max_context,
            receiver=receiver,
            clock=RealClock(),
            decode=_decoder(start.model["path"]),
        )
    except MemoryError as error:
        raise ConfigError(
            f"engine.max_sequences={config.max_sequences} with a context of {start.max_context} tokens does not fit "
            f"the memory: {error}",
            remedy="lower engine.max_sequences or engine.max_context",
        ) from None
    if start.own_weights:
        publisher = make_publisher(route, tensors)
        publisher.copy(0)
        core.stage(publisher.announce(0, 0))
        core.commit(0)
        core.take_swaps()
        publisher.close()
    facts = {"device": str(device), "weights_address": receiver.address, **machine_facts(start.num_threads)}
    channel.send(Ready(token=run_token(), pid=os.getpid(), facts={**facts, **core.facts()}))
    with settled_heap(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage") as stager:
        EngineHost(core, channel, stager, _terms(start)).serve()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTerms:
    """How an engine's process differs from one that simply serves."""

    scribe: DeliveryRecorder | None = None
    """Writes down what the engine is told."""
    gate: ReplayGate | None = None
    """Holds it back, in a replay."""
    cores: AnyCores = field(default_factory=OwnCores)
    """What it computes with."""


class EngineHost:
    """Drives one engine core from one channel."""

    def __init__(
        self,
        core: EngineCore,
        channel: PartChannel,
        stager: ThreadPoolExecutor,
        terms: HostTerms,
    ) -> None:
        self._core = core
        self._channel = channel
        self._stager = stager
        self._scribe = terms.scribe
        self._gate = terms.gate
        self._cores = terms.cores
        self._steps = 0
        self._clock = RealClock()
        self._commits: dict[int, int] = {}
        """The call that asked for each version that is not in use yet."""
        self._broken: ComponentDied | None = None
        """Why nothing more can be staged."""
        self._busy_since: float | None = None
        self._reported_s = 0.0
        self._told_prefill_s = 0.0
        self._worked_s = 0.0
        """All that spans have told, commits aside."""
        self._spans: list[Span] = []

    def serve(self) -> None:
        """Orders, step, report, again; returns when told to shut down."""
        while self._broken is None:
            chunks: list[Chunk] = []
            for message in self._receive():
                if isinstance(message, Shutdown):
                    return
                chunks += self._obey(message)
            if self._may_step():
                if self._busy_since is None:
                    self._busy_since = self._clock.now()
                with self._cores.unit():
                    chunks += self._core.step()
                self._steps += 1
            elif self._gate is not None:
                self._gate.refuse_idleness(self._steps)
            if self._scribe is not None:
                self._scribe.ended(chunks)
            self._report(chunks)
            self._answer_commits()
        raise self._broken

    def _receive(self) -> list[Message]:
        """What the engine is told now; waits a while for it where there is nothing to do."""
        idle = not self._core.has_work()
        if self._gate is not None and self._gate.holds(self._steps):
            idle = self._gate.lacks(self._steps)
        if idle:
            self._cores.rest()
            if self._channel.wait(IDLE_S) and self._busy_since is None:
                self._busy_since = self._clock.now()  # reading a batch of requests is work
        messages: list[Message] = self._channel.receive(0)
        if self._gate is not None:
            messages = self._gate.release(messages, self._steps)
        if self._scribe is not None:
            self._scribe.write(messages, self._steps)
        return messages

    def _may_step(self) -> bool:
        if self._gate is None:
            return self._core.has_work()
        return not self._gate.holds(self._steps) and self._core.has_work()

    def _obey(self, message: Message) -> list[Chunk]:
        match message:
            case Generate(requests=requests):
                return [refused for request in requests for refused in self._add(request)]
            case Abort(request_ids=request_ids):
                return self._core.abort(request_ids)
            case Stage():
                self._stager.submit(self._stage, message)
            case Commit():
                self._commit(message)
            case ScoreTokens():
                self._score(message)
            case Pause(call=call, release=release):
                self._core.pause(release=release)
                self._channel.send(Paused(call=call))
            case Resume(call=call):
                self._core.resume()
                self._channel.send(Paused(call=call))
        return []

    def _add(self, request: GenerateRequest) -> list[Chunk]:
        try:
            self._core.add(request)
        except RequestError as error:
            none = np.zeros(0, np.int32)
            return [
                Chunk(
                    request_id=request.request_id,
                    ids_T=none,
                    logprobs_T=none.astype(np.float32),
                    versions_T=none,
                    error=f"{error.problem}; {error.remedy}",
                    error_kind=type(error).__name__,
                )
            ]
        return []

    def _stage(self, message: Stage) -> None:
        start_s = self._clock.now()
        try:
            self._core.stage(message.update)
        except ComponentDied as error:
            self._broken = error  # this process ends of it, which is the answer
        except HeadraceError as error:
            self._channel.send(_failure(message.call, error))
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever waits for it must hear of it
            words = f"staging version {message.update.version} failed: {type(error).__name__}: {error}"
            self._channel.send(Failure(call=message.call, kind="WeightsError", problem=words, remedy="see the log"))
        else:
            seconds = self._clock.now() - start_s
            self._channel.send(Staged(call=message.call, version=message.update.version, seconds=seconds))

    def _commit(self, message: Commit) -> None:
        try:
            self._core.commit(message.version, message.mode)
        except HeadraceError as error:
            self._channel.send(_failure(message.call, error))
        else:
            self._commits[message.version] = message.call
            self._answer_commits()

    def _answer_commits(self) -> None:
        for report in self._core.take_swaps():
            self._channel.send(Committed(call=self._commits.pop(report.version), report=report))
            now_s = self._clock.now()
            self._spans.append(
                Span(lane="engine", name="commit", start_s=now_s - report.gap_s, end_s=now_s, step=report.version)
            )
            self._report([], now=True)

    def _score(self, message: ScoreTokens) -> None:
        try:
            if message.top_k:
                top = self._core.top_scores(message)
                scores = ScoresAre(
                    call=message.call, logprobs_T=top.logprobs_T, ids_TK=top.ids_TK, logs_TK=top.logs_TK
                )  # fmt: skip
            else:
                scores = ScoresAre(call=message.call, logprobs_T=self._core.score(message))
        except HeadraceError as error:
            self._channel.send(_failure(message.call, error))
        else:
            self._channel.send(scores)

    def _report(self, chunks: list[Chunk], *, now: bool = False) -> None:
        """Send chunks at once; counters and spans with them, or after a while, or when the work is done."""
        time_s = self._clock.now()
        idle = self._busy_since is not None and not self._core.has_work()
        due = self._busy_since is not None and time_s - self._reported_s >= REPORT_S
        if not (chunks or idle or due or now):
            return
        stats = self._core.stats()
        spans, self._spans = self._spans, []
        if self._busy_since is not None and (idle or due):
            spans += worked(self._busy_since, time_s, stats.prefill_s - self._told_prefill_s)
            self._worked_s += time_s - self._busy_since
            self._busy_since = None if idle else time_s
            self._reported_s, self._told_prefill_s = time_s, stats.prefill_s
        begun_s = 0.0 if self._busy_since is None else time_s - self._busy_since
        stats = msgspec.structs.replace(stats, busy_s=self._worked_s + begun_s)
        self._channel.send(Chunks(chunks=tuple(chunks), stats=stats, spans=tuple(spans)))


def worked(start_s: float, end_s: float, prefill_s: float) -> list[Span]:
    """What the engine did all that time: of many passes, those on prompts stand before the others.

    >>> [(span.name, span.end_s - span.start_s) for span in worked(1.0, 1.25, 0.125)]
    [('prefill', 0.125), ('generate', 0.125)]
    """
    turn_s = min(end_s, start_s + prefill_s)
    both = (("prefill", start_s, turn_s), ("generate", turn_s, end_s))
    return [Span(lane="engine", name=name, start_s=left, end_s=right) for name, left, right in both if left < right]


def _terms(start: EngineStart) -> HostTerms:
    mine = cores(start.lending)
    if not start.interleaving:
        return HostTerms(cores=mine)
    names = Names()
    scribe = DeliveryRecorder(Path(start.interleaving), names)
    if start.repeats is None:
        return HostTerms(scribe=scribe, cores=mine)
    repeats = start.repeats
    gate = ReplayGate(
        read_interleaving(Path(repeats.interleaving)),
        names,
        RealClock(),
        deadline_s=repeats.deadline_s,
        whose=lambda seed: _whose(seed, repeats),
    )
    return HostTerms(scribe=scribe, gate=gate, cores=mine)


def _whose(seed: int, run: Repeated) -> str:
    """The request of that seed, in words. Tried one after the other: asked for only where a replay has failed."""
    for group in range(run.num_groups):
        for place in range(run.group_size):
            if episode_seed(run.seed, EpisodeKey(group, place)) == seed:
                return f"group {group} episode {place}"
    return f"the request of seed {seed}"


def _failure(call: int, error: HeadraceError) -> Failure:
    return Failure(call=call, kind=type(error).__name__, problem=error.problem, remedy=error.remedy)


def _decoder(path: str) -> Callable[[list[int]], str] | None:
    """The text of ids as it is, for stop strings; ``None`` for a directory without a tokenizer."""
    try:
        tokenizer = load_tokenizer(path)
    except ModelError:
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
