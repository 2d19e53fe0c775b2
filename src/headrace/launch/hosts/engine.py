"""The process of an engine: a plain synchronous step loop, which reads its orders between two steps. Staging has a
thread. A commit is answered when it has taken effect, since some modes let sequences finish first.

An order carries a number, its *call*, which the answer repeats. Messages are recorded and replayed by step, if the run
asks for it, so that a replay samples the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headrace.base.clock import Clock, RealClock
from headrace.base.environ import run_token
from headrace.base.errors import ComponentDied, HeadraceError, RequestError
from headrace.base.heap import gc_frozen
from headrace.base.types.episode import EpisodeKey, TokenChunk
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import (
    Chunks,
    Committed,
    Failure,
    Paused,
    Ready,
    ScoresReply,
    Staged,
    StageOutcome,
)
from headrace.base.types.messages.engine import (
    ANNOUNCED,
    Abort,
    AbortAllOf,
    Announce,
    Commit,
    Generate,
    GenerateRequest,
    Message,
    Pause,
    Resume,
    ScoreTokens,
    Stage,
)
from headrace.base.types.tokens import Tokens
from headrace.base.types.trace import Span
from headrace.base.types.weights import WeightUpdate
from headrace.engine import EngineConfig, EngineCore
from headrace.engine.config import ENGINES, EngineSetup
from headrace.launch.channel import PartChannel, PartEnd
from headrace.launch.hosts.answers import AnswerRoutes
from headrace.launch.hosts.columns import EngineColumns
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.hosts.interleaving import DeliveryRecorder, ReplayGate, RequestNames
from headrace.launch.interleaving import read_interleaving
from headrace.launch.lending import AnyCores, OwnCores, cores
from headrace.launch.starts import EngineStart, RecordedEngine
from headrace.models.config import ModelConfig
from headrace.rollout.runner import episode_seed
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver

IDLE_S = 0.5
"""Seconds for which an idle engine waits for orders at a time."""
REPORT_S = 0.25
"""Seconds after which a busy engine reports its counters and spans, at the latest."""


def run_engine(start: EngineStart, channel: PartChannel) -> None:
    """Load the engine that ``start`` describes, report over ``channel`` that it is ready, and serve orders until it is
    ordered to shut down. This is the whole work of an engine's process."""
    torch.set_num_threads(start.num_threads)
    config = EngineConfig.model_validate(start.engine)
    with ENGINES.load(config.kind).open(_setup(start, config)) as opened:
        facts = {"device": opened.device, "weights_address": opened.address, **machine_facts(start.num_threads)}
        channel.send(Ready(token=run_token(), pid=os.getpid(), facts={**facts, **opened.facts}))
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage") as stager, gc_frozen():
            EngineHost(opened.core, channel, stager, _host_config(start, channel)).serve()


def _setup(start: EngineStart, config: EngineConfig) -> EngineSetup:
    """Return the arguments with which the chosen kind of engine opens its engine in this process, from the settings
    ``start`` that the launcher sent."""
    route = Route(address=start.memory) if start.own_weights else start.route

    def adopt(core: EngineCore, tensors: Mapping[str, Tensor]) -> None:
        """Give a new engine the tensors of its own model as version 0, through the same transport as later versions."""
        publisher = make_publisher(route, tensors)
        publisher.copy(0)
        core.stage(publisher.announce(0, 0))
        core.commit(0)
        core.take_swaps()
        publisher.close()

    return EngineSetup(
        config=config,
        model=ModelConfig.model_validate(start.model),
        max_context=start.max_context,
        deadline_s=start.route.deadline_s,
        record_kept=start.record_kept,
        record_routing=start.record_routing,
        sleeps=start.sleeps,
        own_weights=start.own_weights,
        history=Path(start.history) if start.history else None,
        receive=lambda tensors: make_receiver(route, tensors, run_token()),
        adopt=adopt,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHostConfig:
    """The recorder and the gate of a recorded or replayed run, and the store, the cores and the clock that the engine's
    loop uses."""

    recorder: DeliveryRecorder | None = None
    """Records the messages that the engine handles; ``None``: they are not recorded."""
    gate: ReplayGate | None = None
    """Holds messages back until their recorded step, in a replay; ``None``: they are handled when they come."""
    answers: AnswerRoutes | None = None
    """Sends chunks to the processes that ask beside the controller; ``None``: the controller alone asks."""
    columns: EngineColumns = field(default_factory=EngineColumns)
    """Puts kept-sets and experts into a store, if the run has one."""
    cores: AnyCores = field(default_factory=OwnCores)
    """The cores with which the engine computes."""
    clock: Clock = field(default_factory=RealClock)


class EngineHost:
    """The step loop of an engine's process: it drives the engine ``core`` by the orders that come over ``channel``, and
    sends chunks, answers and counters back. ``stager`` is the thread in which versions are staged."""

    def __init__(
        self,
        core: EngineCore,
        channel: PartEnd,
        stager: ThreadPoolExecutor,
        config: EngineHostConfig,
    ) -> None:
        """Make the loop; :meth:`serve` runs it. The arguments are described at the class; ``config`` has the recorder,
        the replay gate, the cores and the clock."""
        self._core = core
        self._channel = channel
        self._stager = stager
        self._recorder = config.recorder
        self._gate = config.gate
        self._cores = config.cores
        self._columns = config.columns
        self._answers = config.answers
        self._steps = 0
        self._clock = config.clock
        self._commits: dict[int, int] = {}
        """The calls that ordered the commit of each version that is not in use yet."""
        self._broken: ComponentDied | None = None
        """The reason why no more versions can be staged; the engine then ends."""
        self._busy_since: float | None = None
        self._reported_s = 0.0
        self._reported_prefill_s = 0.0
        self._reported_busy_s = 0.0
        """The seconds of work in all spans that were sent, without commits."""
        self._spans: list[Span] = []

    def serve(self) -> None:
        """Read orders, make a step and send reports, again and again; return on the order to shut down. Raises
        :class:`~headrace.base.errors.ComponentDied` if no more versions can be staged or committed."""
        # no call waits for what the core committed before it had a host
        self._core.take_swaps()
        while self._broken is None:
            chunks: list[TokenChunk] = []
            for message in self._receive():
                if isinstance(message, Shutdown):
                    return
                chunks += self._handle(message)
            if self._may_step():
                if self._busy_since is None:
                    self._busy_since = self._clock.now()
                with self._cores.unit():
                    chunks += self._core.step()
                self._steps += 1
            elif self._gate is not None:
                self._gate.refuse_idleness(self._steps)
            if self._recorder is not None:
                self._recorder.ended(chunks)
            self._report(chunks)
            self._answer_commits()
        raise self._broken

    def _receive(self) -> list[Message]:
        """Return the orders that the engine must handle before its next step; wait up to :data:`IDLE_S` for one if
        there is nothing to do. In a replay, these are the orders that the record has at this step."""
        idle = not self._core.has_work()
        if self._gate is not None and self._gate.must_wait(self._steps):
            idle = self._gate.waits_at(self._steps)
        if idle:
            self._cores.rest()
            if self._channel.wait(IDLE_S) and self._busy_since is None:
                self._busy_since = self._clock.now()  # reading a batch of requests is work
        messages: list[Message] = self._channel.receive(0)
        if self._gate is not None:
            messages = self._gate.release(messages, self._steps)
        if self._recorder is not None:
            self._recorder.write(messages, self._steps)
        return messages

    def _may_step(self) -> bool:
        """Return whether the core has work and, in a replay, need not wait for an order of the record first."""
        if self._gate is None:
            return self._core.has_work()
        return not self._gate.must_wait(self._steps) and self._core.has_work()

    def _handle(self, message: Message) -> list[TokenChunk]:
        """Carry out one order, and return the chunks that result from it: those of aborted and refused requests."""
        match message:
            case Generate(requests=requests):
                if self._answers is not None and not self._answers.add(message):
                    return []
                return [refused for request in requests for refused in self._add(request)]
            case AbortAllOf(answers_to=reader) if self._answers is not None:
                gone = set(self._answers.forget(reader))
                # the core returns all chunks that are due, those of other processes' requests among them
                return [chunk for chunk in self._core.abort(list(gone)) if chunk.request_id not in gone]
            case Abort(request_ids=request_ids):
                return self._core.abort(request_ids)
            case Stage():
                self._stager.submit(self._stage_ordered, message)
            case Announce():
                self._stager.submit(self._stage_announced, message)
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

    def _add(self, request: GenerateRequest) -> list[TokenChunk]:
        """Add a request to the engine; return the chunk that ends it at once if the engine refuses it."""
        try:
            self._core.add(request)
        except RequestError as error:
            return [TokenChunk(request_id=request.request_id, tokens=Tokens.observed([])).failed(error)]
        return []

    def _stage_ordered(self, message: Stage) -> None:
        """Stage a version that the controller has ordered, and answer with the seconds that it took, or with the
        failure. This runs in the thread that stages."""
        version, start_s = message.update.version, self._clock.now()
        failure = self._stage_in_core(message.update, message.call)
        if self._broken is None:
            seconds = self._clock.now() - start_s
            self._channel.send(failure or Staged(call=message.call, version=version, seconds=seconds))

    def _stage_announced(self, message: Announce) -> None:
        """Stage a version that the learner has announced, report the outcome to the controller, and queue its commit if
        the announcement says so. This runs in the thread that stages."""
        version, start_s = message.update.version, self._clock.now()
        failure = self._stage_in_core(message.update, None)
        if self._broken is not None:
            return
        seconds, commits = self._clock.now() - start_s, failure is None and message.commit is not None
        self._channel.send(StageOutcome(version=version, seconds=seconds, failure=failure, commits=commits))
        if failure is None and message.commit is not None:
            # The commit goes through the queue of orders so that it is recorded and replayed like any other.
            self._channel.send_to_self(Commit(call=ANNOUNCED, version=version, mode=message.commit))

    def _stage_in_core(self, update: WeightUpdate, call: int | None) -> Failure | None:
        """Stage ``update`` in the core, and return the failure as a message with the number ``call``; ``None`` if it is
        staged, or if the engine has to end. This runs in the thread that stages."""
        try:
            self._core.stage(update)
        except ComponentDied as error:
            self._broken = error  # the step loop raises it, and its end is the answer
        except HeadraceError as error:
            return _failure(call, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the failure is the answer
            words = f"staging version {update.version} failed: {type(error).__name__}: {error}"
            return Failure(call=call, kind="WeightsError", problem=words, remedy="see the log")
        return None

    def _commit(self, message: Commit) -> None:
        """Let the core begin a commit. Its answer is sent when the core reports that it has taken effect; a commit that
        the core refuses is answered with the failure."""
        try:
            self._core.commit(message.version, message.mode)
        except HeadraceError as error:
            if message.call == ANNOUNCED:  # no task waits for the answer to this call
                self._broken = ComponentDied(error.problem, remedy=error.remedy)
            self._channel.send(_failure(message.call, error))
        else:
            self._commits[message.version] = message.call
            self._answer_commits()

    def _answer_commits(self) -> None:
        """Answer the commits that the core has completed, after a report of the counters and of the times of the
        commits (spans)."""
        for report in self._core.take_swaps():
            now_s = self._clock.now()
            self._spans.append(
                Span(lane="engine", name="commit", start_s=now_s - report.gap_s, end_s=now_s, step=report.version)
            )
            self._report(
                [], now=True
            )  # before the answer, so that the counters show the new version when the commit is answered
            self._channel.send(Committed(call=self._commits.pop(report.version), report=report))

    def _score(self, message: ScoreTokens) -> None:
        """Compute the logprobs of given tokens, and the likeliest entries if the order asks for them, and send them, or
        the failure."""
        try:
            message = self._columns.read(message)
            if message.top_k:
                top = self._core.top_scores(message)
                scores = ScoresReply(
                    call=message.call, logprobs_T=top.logprobs_T, ids_TK=top.ids_TK, logs_TK=top.logs_TK
                )  # fmt: skip
            else:
                scores = ScoresReply(call=message.call, logprobs_T=self._core.score(message))
        except HeadraceError as error:
            self._channel.send(_failure(message.call, error))
        else:
            self._channel.send(scores)

    def _report(self, chunks: list[TokenChunk], *, now: bool = False) -> None:
        """Send ``chunks``, with counters and spans; their kept-sets and experts go into the store, if there is one, and
        a sequence for which it has no room fails. Without chunks, send these only ``now``, at the end of the work, or
        if the last report is :data:`REPORT_S` ago."""
        time_s = self._clock.now()
        idle = self._busy_since is not None and not self._core.has_work()
        due = self._busy_since is not None and time_s - self._reported_s >= REPORT_S
        if not (chunks or idle or due or now):
            return
        chunks = self._columns.stored(chunks, self._core.abort)
        stats = self._core.stats()
        spans, self._spans = self._spans, []
        if self._busy_since is not None and (idle or due):
            spans += busy_spans(self._busy_since, time_s, stats.prefill_s - self._reported_prefill_s)
            self._reported_busy_s += time_s - self._busy_since
            self._busy_since = None if idle else time_s
            self._reported_s, self._reported_prefill_s = time_s, stats.prefill_s
        begun_s = 0.0 if self._busy_since is None else time_s - self._busy_since
        stats = msgspec.structs.replace(stats, busy_s=self._reported_busy_s + begun_s)
        if self._answers is not None and chunks:
            chunks = self._answers.split(chunks, stats)
            if not (chunks or idle or due or now):
                self._spans = spans
                return
        self._channel.send(Chunks(chunks=tuple(chunks), stats=stats, spans=tuple(spans)))


def busy_spans(start_s: float, end_s: float, prefill_s: float) -> list[Span]:
    """Return the spans (for the event trace) of the time from ``start_s`` to ``end_s``, in which the engine worked and
    spent ``prefill_s`` seconds on prompts. They stand for many passes, so all prefill time is put first.

    >>> [(span.name, span.end_s - span.start_s) for span in busy_spans(1.0, 1.25, 0.125)]
    [('prefill', 0.125), ('generate', 0.125)]
    """
    turn_s = min(end_s, start_s + prefill_s)
    both = (("prefill", start_s, turn_s), ("generate", turn_s, end_s))
    return [Span(lane="engine", name=name, start_s=left, end_s=right) for name, left, right in both if left < right]


def _host_config(start: EngineStart, channel: PartChannel) -> EngineHostConfig:
    """Return the configuration of the host over ``channel``: with a recorder if the run records its interleaving, and
    with a gate that repeats a recorded one if it is a replay."""
    config = EngineHostConfig(
        cores=cores(start.lending), columns=EngineColumns(start.columns), answers=AnswerRoutes(channel)
    )
    if not start.interleaving:
        return config
    names = RequestNames()
    recorder = DeliveryRecorder(Path(start.interleaving), names)
    if start.recorded is None:
        return replace(config, recorder=recorder)
    recorded = start.recorded
    gate = ReplayGate(
        read_interleaving(Path(recorded.interleaving)),
        names,
        RealClock(),
        deadline_s=recorded.deadline_s,
        name_request=lambda seed: _name_request(seed, recorded),
    )
    return replace(config, recorder=recorder, gate=gate)


def _name_request(seed: int, run: RecordedEngine) -> str:
    """Return the name of the request with this seed, for an error text. It tries all requests of the run, which is
    slow, but is called only after a replay has failed."""
    for group in range(run.num_groups):
        for place in range(run.group_size):
            if episode_seed(run.seed, EpisodeKey(group, place)) == seed:
                return f"group {group} episode {place}"
    return f"the request of seed {seed}"


def _failure(call: int | None, error: HeadraceError) -> Failure:
    """Return the message that reports ``error`` as the answer to the order ``call``; ``None``: to no order."""
    return Failure(call=call, kind=type(error).__name__, problem=error.problem, remedy=error.remedy)
