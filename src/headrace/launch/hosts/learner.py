"""The learner's process, or one of its ranks: orders one after the other; snapshots are hashed in a thread while the
next batch trains.

    controller ──▶ rank 0 ──▶ all ranks: the same order ──▶ each computes its part ──▶ rank 0 answers
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.environ import run_token
from headrace.base.errors import ComponentDied, HeadraceError, RankLost, WeightsError
from headrace.base.heap import settled_heap
from headrace.base.types.messages.codec import MessageCodec, Shutdown
from headrace.base.types.messages.controller import (
    Failure,
    LogprobsAre,
    Published,
    Ready,
    Saved,
    SnapshotTaken,
    Trained,
    Working,
)
from headrace.base.types.messages.learner import Logprobs, Message, Publish, Resend, Save, Train
from headrace.base.types.trace import Span
from headrace.launch.channel import PartChannel
from headrace.launch.hosts import LOST
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.lending import AnyCores, cores
from headrace.launch.starts import LearnerStart
from headrace.learner import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.parallel.load import load_for
from headrace.learner.parallel.mesh import Alone, AnyRanks, Ranks, joined, named_loss
from headrace.learner.parallel.shards import wholes
from headrace.learner.progress import Progress
from headrace.models.config import ModelConfig
from headrace.models.devices import use
from headrace.models.weights import weight_tensors
from headrace.sync.config import Route
from headrace.sync.manifest import plan
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher

WAIT_S = 60.0
"""How long to wait for orders at a time."""
HEARTBEAT_S = 1.0
"""How often the controller is told that this process lives, and what it is at."""


def run_learner(start: LearnerStart, channel: PartChannel) -> None:
    """Load, report, serve until told to shut down."""
    torch.set_num_threads(start.num_threads)
    config = LearnerConfig.model_validate(start.learner)
    device = use("learner.device", config.device)
    with joined(config.parallel, start.place, device, start.rendezvous) as ranks:
        try:
            with named_loss(start.rank):
                _run(start, config, Line(channel, ranks))
        except RankLost:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(LOST)  # the other's end is what the user must hear of; whatever waits for it here waits for ever


def _run(start: LearnerStart, config: LearnerConfig, line: Line) -> None:
    asked = ModelConfig.model_validate(start.model)
    model = load_for(asked.at(start.snapshot) if start.snapshot else asked, line.ranks)
    clock = RealClock()
    context = LearnerContext(
        temperature=start.temperature,
        total_steps=start.total_steps,
        model_dir=Path(asked.path),
        clock=clock,
        progress=Progress(clock),
    )
    objective = Objective.build(AlgoConfig.model_validate(start.algo))
    core = LearnerCore(model, config, objective, context, line.ranks)
    if start.snapshot:
        core.restore(Path(start.snapshot), weights=asked.lora is not None)
    weights = PublishedBuffers(model, start.route, line.ranks)
    facts: dict[str, str | int | float] = {
        **machine_facts(start.num_threads),
        "device": str(line.ranks.device),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_bytes": plan(weight_tensors(model)).total_bytes,
    }
    line.channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts))
    with settled_heap(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="announce") as announcer:
        host = LearnerHost(core, weights, line, announcer, cores(start.lending))
        with heartbeat(line.channel, context.progress):
            host.serve(context.progress)
    weights.close()


@contextmanager
def heartbeat(channel: PartChannel, progress: Progress) -> Iterator[None]:
    """Within this the controller is told every :data:`HEARTBEAT_S` seconds what the learner is at."""
    clock, over = RealClock(), threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            unit = progress.unit
            channel.send(
                Working(
                    num_units=progress.num_units,
                    what=unit.what,
                    since_s=clock.now() - unit.begun_s,
                    usual_s=progress.usual_s(),
                )
            )

    beating = threading.Thread(target=beat, daemon=True, name="heartbeat")
    beating.start()
    try:
        yield
    finally:
        over.set()
        beating.join()


class Line:
    """The controller's orders, heard by every rank, and the answers, which the first gives for all."""

    def __init__(self, channel: PartChannel, ranks: AnyRanks) -> None:
        self.channel = channel
        self.ranks = ranks
        self._codec = MessageCodec(Message)

    def orders(self) -> Iterator[Message]:
        """One after the other, on every rank the same; never ends."""
        while True:
            if isinstance(self.ranks, Alone):
                yield from self.channel.receive(WAIT_S)
            elif self.ranks.leads:
                yield from self._pass_on(self.ranks)
            elif words := self.ranks.hear(None):
                yield self._codec.decode(words)

    def say(self, message: Any) -> None:
        """Answer the controller."""
        if self.ranks.leads:
            self.channel.send(message)

    def _pass_on(self, ranks: Ranks) -> Iterator[Message]:
        """While there are no orders the others are told so from time to time: none of them waits for long."""
        messages = self.channel.receive(min(WAIT_S, ranks.config.timeout_s / 2))
        for message in messages:
            ranks.hear(self._codec.encode(message))
            yield message
        if not messages:
            ranks.hear(b"")


class PublishedBuffers:
    """The buffers, filled with what lies on all ranks. All of them must call :meth:`copy`."""

    def __init__(self, model: PreTrainedModel, route: Route, ranks: AnyRanks) -> None:
        self._tensors = weight_tensors(model)
        self._whole = isinstance(ranks, Alone)
        self.publisher = make_publisher(route, self._tensors, run_token()) if ranks.leads else None

    def copy(self, slot: int) -> None:
        """Into ``slot``."""
        if self._whole and self.publisher is not None:
            self.publisher.copy(slot)
            return
        gathered = (tensor for _, tensor in wholes(self._tensors.items()))
        if self.publisher is not None:
            self.publisher.fill(slot, gathered)
        else:
            deque(gathered, maxlen=0)

    def close(self) -> None:
        """Remove them."""
        if self.publisher is not None:
            self.publisher.close()


class LearnerHost:
    """Drives one learner core, or one rank of it."""

    def __init__(
        self, core: LearnerCore, weights: PublishedBuffers, line: Line, announcer: ThreadPoolExecutor, cores: AnyCores
    ) -> None:
        self._core = core
        self._weights = weights
        self._line = line
        self._announcer = announcer
        self._cores = cores
        self._clock = RealClock()

    def serve(self, progress: Progress) -> None:
        """One order after the other, each told to ``progress``; returns when told to shut down."""
        self._cores.rest()
        for message in self._line.orders():
            if isinstance(message, Shutdown):
                return
            told = progress.at(type(message).__name__, _in_words(message))
            with told, self._cores.unit(message.batch.num_tokens if isinstance(message, Train) else None):
                self._answer(message.call, partial(self._obey, message))
            self._cores.rest()

    def _obey(self, message: Message) -> None:
        match message:
            case Train(call=call, batch=batch):
                report = self._core.train(batch)
                self._line.say(Trained(call=call, report=report, spans=self._core.take_spans()))
            case Logprobs(call=call, batch=batch):
                self._line.say(LogprobsAre(call=call, logprobs_N=self._core.logprobs(batch)))
            case Publish():
                self._publish(message)
            case Resend():
                self._announce_soon(message)
            case Save(call=call, directory=directory):
                start_s = self._clock.now()
                self._core.save(Path(directory))
                seconds = self._clock.now() - start_s
                self._line.say(Saved(call=call, seconds=seconds, spans=self._core.take_spans()))

    def _publish(self, message: Publish) -> None:
        start_s = self._clock.now()
        self._weights.copy(message.slot)
        end_s = self._clock.now()
        span = Span(lane="learner", name="snapshot", start_s=start_s, end_s=end_s, step=message.version)
        self._line.say(SnapshotTaken(call=message.call, seconds=end_s - start_s, spans=(span,)))
        self._announce_soon(message)

    def _announce_soon(self, message: Publish | Resend) -> None:
        if self._weights.publisher is not None:
            announce = partial(self._announce, message, self._weights.publisher)
            self._announcer.submit(self._answer, message.call, announce)

    def _announce(self, message: Publish | Resend, publisher: Publisher) -> None:
        again = isinstance(message, Resend)
        try:
            update = (publisher.resend if again else publisher.announce)(message.version, message.slot, message.to)
        except HeadraceError:
            raise
        except Exception as error:  # the edge of a thread: whoever waits for it must hear of it
            traceback.print_exc()
            words = f"publishing version {message.version} failed: {type(error).__name__}: {error}"
            raise WeightsError(words, remedy="the traceback is in logs/learner.log of the run directory") from error
        self._line.say(Published(call=message.call, update=update))

    def _answer(self, call: int, work: Callable[[], Any]) -> None:
        """Do it; where it fails, whoever asked hears of it and the learner goes on, unless a rank cannot."""
        try:
            work()
        except ComponentDied:
            raise
        except HeadraceError as error:
            kind, problem, remedy = type(error).__name__, error.problem, error.remedy
            self._line.say(Failure(call=call, kind=kind, problem=problem, remedy=remedy))


def _in_words(order: Message) -> str:
    """What the learner is at while it carries out that order."""
    match order:
        case Train(batch=batch):
            return f"step {batch.step}"
        case Logprobs():
            return "log-probabilities of a batch"
        case Publish(version=version):
            return f"the copy of version {version}"
        case Resend(version=version):
            return f"version {version}, sent once more"
        case Save(directory=directory):
            return f"the snapshot {directory}"
        case Shutdown():
            return "its end"
