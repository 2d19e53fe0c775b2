"""The process of an engine. It runs a synchronous step loop, which reads orders between two steps. New versions are
staged in a separate thread. A commit is answered when it has taken effect, because some interrupt modes let sequences
finish first.

An order has a number, its *call*, which its answer repeats. If the settings require it, messages are recorded or
replayed with the number of the step, so that a replay samples the same tokens.
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
from headrace.launch.lending import AnyCores, OwnCores, make_cores
from headrace.launch.starts import EngineStart, RecordedEngine
from headrace.models.config import ModelConfig
from headrace.models.gpus import describe_place
from headrace.rollout.runner import episode_seed
from headrace.sync.config import Route
from headrace.sync.transports import make_publisher, make_receiver

IDLE_S = 0.5
"""The longest time for which an idle engine waits for orders before it checks its state again, in seconds."""
REPORT_S = 0.25
"""The longest time between two reports of a busy engine's counters and spans, in seconds."""


def run_engine(start: EngineStart, channel: PartChannel) -> None:
    """Load the engine that ``start`` describes, report over ``channel`` that it is ready, and handle orders until the
    order to shut down. This is the main function of an engine's process."""
    torch.set_num_threads(start.num_threads)
    config = EngineConfig.model_validate(start.engine)
    with ENGINES.load(config.kind).open(_make_setup(start, config)) as opened:
        location = {"device": opened.device, "weights_address": opened.address, "place": describe_place(opened.device)}
        facts: dict[str, str | int | float] = {**location, **machine_facts(start.num_threads), **opened.facts}
        channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts))
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage") as stager, gc_frozen():
            EngineHost(opened.core, channel, stager, _make_host_config(start, channel)).serve()


def _make_setup(start: EngineStart, config: EngineConfig) -> EngineSetup:
    """Return the arguments with which the configured kind of engine opens its engine in this process. ``start`` are the
    settings from the launcher, and ``config`` are the engine's own settings."""
    route = Route(address=start.memory) if start.own_weights else start.route

    def adopt(core: EngineCore, tensors: Mapping[str, Tensor]) -> None:
        """Load ``tensors``, the weights of the engine's own model, into a new engine as version 0, through the same
        transport as later versions."""
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
    """The objects that the engine's loop uses: the recorder and the replay gate of a recorded or replayed run, the
    answer routes, the store, the cores and the clock."""

    recorder: DeliveryRecorder | None = None
    """Records the messages that the engine handles; ``None`` means that they are not recorded."""
    gate: ReplayGate | None = None
    """Delays messages until their recorded step in a replay; ``None`` means that messages are handled when they
    arrive."""
    answers: AnswerRoutes | None = None
    """Sends chunks to processes other than the controller; ``None`` means that only the controller sends requests."""
    columns: EngineColumns = field(default_factory=EngineColumns)
    """Writes kept-sets and experts into the store, if the run has one."""
    cores: AnyCores = field(default_factory=OwnCores)
    """The cores on which the engine computes."""
    clock: Clock = field(default_factory=RealClock)
    """The clock that measures times and deadlines."""


class EngineHost:
    """The step loop of an engine's process. It executes the orders that arrive over ``channel`` on the engine ``core``,
    and sends chunks, answers and counters. ``stager`` is the thread in which versions are staged."""

    def __init__(
        self, core: EngineCore, channel: PartEnd, stager: ThreadPoolExecutor, config: EngineHostConfig
    ) -> None:
        """Create the loop; :meth:`serve` runs it. The class describes the arguments; ``config`` contains the other
        objects that the loop uses."""
        self._core = core
        self._channel = channel
        self._stager = stager
        self._recorder = config.recorder
        self._gate = config.gate
        self._cores = config.cores
        self._columns = config.columns
        self._answers = config.answers
        self._steps = 0
        """The number of steps that the engine has made."""
        self._clock = config.clock
        self._commits: dict[int, int] = {}
        """For each version whose commit has not taken effect: the number of the order to commit it."""
        self._broken: ComponentDied | None = None
        """The reason why no more versions can be staged, after which the engine ends; ``None`` if they can."""
        self._busy_since: float | None = None
        """The time since which the engine has been working, or the last report of its work; ``None`` while it is
        idle."""
        self._reported_s = 0.0
        """The time of the last report of the engine's work."""
        self._reported_prefill_s = 0.0
        """The total seconds of prefill at that time."""
        self._reported_busy_s = 0.0
        """The total seconds of work in the spans that were sent, without commits."""
        self._spans: list[Span] = []
        """The spans that were not sent yet."""

    def serve(self) -> None:
        """Repeat three steps until the order to shut down: handle orders, make a step of the engine, and send reports.
        Raises :class:`~headrace.base.errors.ComponentDied` if no more versions can be staged or committed."""
        # no order waits for the commits that the core made before it had a host
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
                self._recorder.remove_ended(chunks)
            self._report(chunks)
            self._answer_commits()
        raise self._broken

    def _receive(self) -> list[Message]:
        """Return the orders that the engine must handle before its next step. If there is no work, wait up to
        :data:`IDLE_S` for an order. In a replay, the result contains the orders that were recorded at this step."""
        idle = not self._core.has_work()
        if self._gate is not None and self._gate.must_wait(self._steps):
            idle = self._gate.awaits_message(self._steps)
        if idle:
            self._cores.mark_waiting()
            if self._channel.wait(IDLE_S) and self._busy_since is None:
                self._busy_since = self._clock.now()  # reading a batch of requests is work
        messages: list[Message] = self._channel.receive(0)
        if self._gate is not None:
            messages = self._gate.release(messages, self._steps)
        if self._recorder is not None:
            self._recorder.write(messages, self._steps)
        return messages

    def _may_step(self) -> bool:
        """Return whether the core has work and, in a replay, does not have to wait for a recorded order first."""
        if self._gate is None:
            return self._core.has_work()
        return not self._gate.must_wait(self._steps) and self._core.has_work()

    def _handle(self, message: Message) -> list[TokenChunk]:
        """Execute one order, and return the resulting chunks: the last chunks of aborted and refused requests."""
        match message:
            case Generate(requests=requests):
                if self._answers is not None and not self._answers.add(message):
                    return []
                return [chunk for request in requests for chunk in self._add(request)]
            case AbortAllOf(answers_to=reader) if self._answers is not None:
                aborted_ids = set(self._answers.forget(reader))
                # the core returns all pending chunks, including chunks of other processes' requests
                return [chunk for chunk in self._core.abort(list(aborted_ids)) if chunk.request_id not in aborted_ids]
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
        """Add a request to the engine. If the engine refuses the request, return the chunk that ends it; otherwise
        return no chunk."""
        try:
            self._core.add(request)
        except RequestError as error:
            return [TokenChunk(request_id=request.request_id, tokens=Tokens.observed([])).with_error(error)]
        return []

    def _stage_ordered(self, message: Stage) -> None:
        """Stage a version that the controller has ordered, and answer with the seconds that this took, or with the
        failure. This runs in the staging thread."""
        version, start_s = message.update.version, self._clock.now()
        failure = self._stage_in_core(message.update, message.call)
        if self._broken is None:
            seconds = self._clock.now() - start_s
            self._channel.send(failure or Staged(call=message.call, version=version, seconds=seconds))

    def _stage_announced(self, message: Announce) -> None:
        """Stage a version that the learner has announced, report the outcome to the controller and, if the announcement
        says so, queue the order to commit it. This runs in the staging thread."""
        version, start_s = message.update.version, self._clock.now()
        failure = self._stage_in_core(message.update, None)
        if self._broken is not None:
            return
        seconds, commits = self._clock.now() - start_s, failure is None and message.commit is not None
        self._channel.send(StageOutcome(version=version, seconds=seconds, failure=failure, commits=commits))
        if failure is None and message.commit is not None:
            # The commit is queued as an order, so that it is recorded and replayed like any other commit.
            self._channel.send_to_self(Commit(call=ANNOUNCED, version=version, mode=message.commit))

    def _stage_in_core(self, update: WeightUpdate, call: int | None) -> Failure | None:
        """Stage ``update`` in the core. Return ``None`` if it is staged or if the engine has to end; otherwise return
        the failure as a message with the number ``call``. This runs in the staging thread."""
        try:
            self._core.stage(update)
        except ComponentDied as error:
            self._broken = error  # the step loop raises the error, which ends the process
        except HeadraceError as error:
            return _make_failure(call, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the failure is the answer
            problem = f"staging version {update.version} failed: {type(error).__name__}: {error}"
            return Failure(call=call, kind="WeightsError", problem=problem, remedy="see the log")
        return None

    def _commit(self, message: Commit) -> None:
        """Begin a commit in the core. It is answered when the core reports that it has taken effect. If the core
        refuses the commit, the answer is the failure."""
        try:
            self._core.commit(message.version, message.mode)
        except HeadraceError as error:
            if message.call == ANNOUNCED:  # the controller has not sent this order and does not wait for an answer
                self._broken = ComponentDied(error.problem, remedy=error.remedy)
            self._channel.send(_make_failure(message.call, error))
        else:
            self._commits[message.version] = message.call
            self._answer_commits()

    def _answer_commits(self) -> None:
        """Answer the commits that the core has completed. Before each answer, report the counters and the duration of
        the commit as a span."""
        for report in self._core.take_swaps():
            now_s = self._clock.now()
            self._spans.append(
                Span(lane="engine", name="commit", start_s=now_s - report.gap_s, end_s=now_s, step=report.version)
            )
            # before the answer, so that the counters show the new version when the commit is answered
            self._report([], now=True)
            self._channel.send(Committed(call=self._commits.pop(report.version), report=report))

    def _score(self, message: ScoreTokens) -> None:
        """Compute the logprobs of given tokens and, if the order requests them, the most likely vocabulary entries.
        Send the result, or the failure."""
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
            self._channel.send(_make_failure(message.call, error))
        else:
            self._channel.send(scores)

    def _report(self, chunks: list[TokenChunk], *, now: bool = False) -> None:
        """Send ``chunks``, the counters and the spans to the controller. Kept-sets and experts are written into the
        store, if there is one; a sequence for which the store has no space fails. Without chunks, a report is sent only
        with ``now``, at the end of the work, or if the last report was :data:`REPORT_S` ago."""
        time_s = self._clock.now()
        idle = self._busy_since is not None and not self._core.has_work()
        due = self._busy_since is not None and time_s - self._reported_s >= REPORT_S
        if not (chunks or idle or due or now):
            return
        chunks = self._columns.store(chunks, self._core.abort)
        stats = self._core.stats()
        spans, self._spans = self._spans, []
        if self._busy_since is not None and (idle or due):
            spans += busy_spans(self._busy_since, time_s, stats.prefill_s - self._reported_prefill_s)
            self._reported_busy_s += time_s - self._busy_since
            self._busy_since = None if idle else time_s
            self._reported_s, self._reported_prefill_s = time_s, stats.prefill_s
        unreported_s = 0.0 if self._busy_since is None else time_s - self._busy_since
        stats = msgspec.structs.replace(stats, busy_s=self._reported_busy_s + unreported_s)
        if self._answers is not None and chunks:
            chunks = self._answers.split(chunks, stats)
            if not (chunks or idle or due or now):
                # the controller receives no chunks now: its spans are part of the next report
                self._spans = spans
                return
        self._channel.send(Chunks(chunks=tuple(chunks), stats=stats, spans=tuple(spans)))


def busy_spans(start_s: float, end_s: float, prefill_s: float) -> list[Span]:
    """Return the spans, for the event trace, of the time from ``start_s`` to ``end_s``, in which the engine was working
    and spent ``prefill_s`` seconds on prompts. The spans summarize many passes, so the total prefill time comes first.

    >>> [(span.name, span.end_s - span.start_s) for span in busy_spans(1.0, 1.25, 0.125)]
    [('prefill', 0.125), ('generate', 0.125)]
    """
    turn_s = min(end_s, start_s + prefill_s)
    phases = (("prefill", start_s, turn_s), ("generate", turn_s, end_s))
    return [Span(lane="engine", name=name, start_s=left, end_s=right) for name, left, right in phases if left < right]


def _make_host_config(start: EngineStart, channel: PartChannel) -> EngineHostConfig:
    """Return the configuration of the host over ``channel``, with the settings ``start``. It contains a recorder if the
    run records its interleaving and, in a replay, also a gate for the recorded interleaving."""
    config = EngineHostConfig(
        cores=make_cores(start.lending), columns=EngineColumns(start.columns), answers=AnswerRoutes(channel)
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
    """Return the name of the request with the sampling seed ``seed``, for an error text. This tries all requests of the
    recorded ``run``, which is slow, and is called only after a replay has failed."""
    for group in range(run.num_groups):
        for place in range(run.group_size):
            if episode_seed(run.seed, EpisodeKey(group, place)) == seed:
                return f"group {group} episode {place}"
    return f"the request of seed {seed}"


def _make_failure(call: int | None, error: HeadraceError) -> Failure:
    """Return the message that reports ``error`` as the answer to the order ``call``; ``None`` if it is not the answer
    to an order."""
    return Failure(call=call, kind=type(error).__name__, problem=error.problem, remedy=error.remedy)
