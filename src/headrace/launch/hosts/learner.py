"""The learner's process: orders one after the other; snapshots are hashed in a thread while the next batch trains."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.clock import RealClock
from headrace.environ import run_token
from headrace.errors import HeadraceError, WeightsError
from headrace.launch.channel import PartChannel
from headrace.launch.heap import settled_heap
from headrace.launch.starts import LearnerStart
from headrace.learner import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models.config import ModelConfig
from headrace.models.load import load_model
from headrace.models.weights import weight_tensors
from headrace.sync.shm import ShmPublisher
from headrace.types.messages.controller import Failure, LogprobsAre, Published, Ready, Saved, SnapshotTaken, Trained
from headrace.types.messages.learner import Logprobs, Message, Publish, Save, Shutdown, Train
from headrace.types.trace import Span

WAIT_S = 60.0
"""How long to wait for orders at a time."""


def run_learner(start: LearnerStart, channel: PartChannel) -> None:
    """Load, report, serve until told to shut down."""
    torch.set_num_threads(start.num_threads)
    model = load_model(ModelConfig.model_validate(start.model))
    context = LearnerContext(
        temperature=start.temperature,
        total_steps=start.total_steps,
        model_dir=Path(start.tokenizer_dir),
        clock=RealClock(),
    )
    objective = Objective.build(AlgoConfig.model_validate(start.algo))
    core = LearnerCore(model, LearnerConfig.model_validate(start.learner), objective, context)
    if start.snapshot:
        core.restore(Path(start.snapshot))
    publisher = ShmPublisher(Path(start.weights_path), weight_tensors(model))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts: dict[str, str | int | float] = {
        "threads": start.num_threads,
        "parameters": parameters,
        "weights_bytes": publisher.manifest.total_bytes,
    }
    channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts))
    with settled_heap(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="announce") as announcer:
        LearnerHost(core, publisher, channel, announcer).serve()
    publisher.close()


class LearnerHost:
    """Drives one learner core from one channel."""

    def __init__(
        self, core: LearnerCore, publisher: ShmPublisher, channel: PartChannel, announcer: ThreadPoolExecutor
    ) -> None:
        self._core = core
        self._publisher = publisher
        self._channel = channel
        self._announcer = announcer
        self._clock = RealClock()

    def serve(self) -> None:
        """One order after the other; returns when told to shut down."""
        while True:
            for message in self._channel.receive(WAIT_S):
                if isinstance(message, Shutdown):
                    return
                self._answer(message.call, partial(self._obey, message))

    def _obey(self, message: Message) -> None:
        match message:
            case Train(call=call, batch=batch):
                report = self._core.train(batch)
                self._channel.send(Trained(call=call, report=report, spans=self._core.take_spans()))
            case Logprobs(call=call, batch=batch):
                self._channel.send(LogprobsAre(call=call, logprobs_N=self._core.logprobs(batch)))
            case Publish():
                self._publish(message)
            case Save(call=call, directory=directory):
                start_s = self._clock.now()
                self._core.save(Path(directory))
                seconds = self._clock.now() - start_s
                self._channel.send(Saved(call=call, seconds=seconds, spans=self._core.take_spans()))

    def _publish(self, message: Publish) -> None:
        start_s = self._clock.now()
        self._publisher.copy(message.slot)
        end_s = self._clock.now()
        span = Span(lane="learner", name="snapshot", start_s=start_s, end_s=end_s, step=message.version)
        self._channel.send(SnapshotTaken(call=message.call, seconds=end_s - start_s, spans=(span,)))
        self._announcer.submit(self._answer, message.call, lambda: self._announce(message))

    def _announce(self, message: Publish) -> None:
        try:
            update = self._publisher.announce(message.version, message.slot)
        except HeadraceError:
            raise
        except Exception as error:  # the edge of a thread: whoever waits for it must hear of it
            traceback.print_exc()
            words = f"publishing version {message.version} failed: {type(error).__name__}: {error}"
            raise WeightsError(words, remedy="the traceback is in logs/learner.log of the run directory") from error
        self._channel.send(Published(call=message.call, update=update))

    def _answer(self, call: int, work: Callable[[], Any]) -> None:
        """Do it; where it fails, whoever asked hears of it and the learner goes on."""
        try:
            work()
        except HeadraceError as error:
            kind, problem, remedy = type(error).__name__, error.problem, error.remedy
            self._channel.send(Failure(call=call, kind=kind, problem=problem, remedy=remedy))
