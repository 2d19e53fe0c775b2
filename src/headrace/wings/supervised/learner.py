"""The learner of a run on given rows: in the process of the run, or spread over ranks, processes of this machine.

    the run ──▶ every rank: the same order (train, evaluate, save) ──▶ all compute it together ──▶ rank 0 answers

A *rank* is one process of a learner that is divided among several (``learner.parallel``).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from headrace.base.clock import RealClock
from headrace.base.environ import RankPlace, child_environment, num_cores, rank_environment
from headrace.base.errors import HeadraceError, RankLost
from headrace.base.heap import gc_frozen
from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.messages.controller import Failure, Saved, StepReport, Trained
from headrace.base.types.messages.learner import Save
from headrace.base.types.trace import Span
from headrace.launch.clients.peer import error_of
from headrace.launch.hosts import EXIT_RANK_LOST, EXIT_REPORTED
from headrace.launch.hosts.main import exit_with
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.learner.parallel.load import load_for
from headrace.learner.parallel.mesh import AnyRanks, SingleRank, explained_rank_loss, joined
from headrace.models.devices import num_gpus, settle, use
from headrace.wings.supervised.config import DistillConfig, DpoConfig, SftConfig, TuningConfig, load_tuning
from headrace.wings.supervised.preparing import PreparedTuning, learner_settings, objective_of
from headrace.wings.supervised.tied import TiedProcess, read_order

LOGS = "logs"
"""The directory, in that of the run, of the logs of its processes."""
LOST_S = 10.0
"""Seconds to wait, after one rank has ended, for another whose end was the cause."""
VERBS: dict[str, type[TuningConfig]] = {kind.verb: kind for kind in (SftConfig, DpoConfig, DistillConfig)}


class TuningLearner(Protocol):
    """What a run on given rows asks of its learner; see :class:`~headrace.learner.core.LearnerCore`."""

    def train(self, batch: Batch) -> StepReport:
        """Make one step on ``batch``."""
        ...

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss of ``batch`` and its metrics, without training."""
        ...

    def save(self, directory: Path) -> None:
        """Write a snapshot into ``directory``."""
        ...

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans of time since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLearner:
    """A learner that has loaded its model, and where it computes."""

    learner: TuningLearner
    devices: tuple[str, ...]
    """The device of each rank."""
    pids: tuple[int, ...] = ()
    """The process of each rank; empty if the run's own process computes."""


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one rank of a learner on given rows."""

    verb: str
    """``sft``, ``dpo`` or ``distill``."""
    config: dict[str, Any]
    """The run file, as JSON data."""
    snapshot: str
    """The directory of the snapshot to continue from; empty for a new run."""
    total_steps: int
    """Optimizer steps of the whole run."""
    device: str
    """The device of this rank."""
    num_threads: int
    """The number of threads that it computes with."""
    rank: int
    """The index of this rank. Rank 0 answers the orders."""
    world: int
    """The number of ranks."""
    rendezvous: str
    """The address at which the ranks find each other: torch's ``init_method``."""

    @property
    def place(self) -> RankPlace:
        """The place of this rank among all, which are on one machine."""
        return RankPlace(rank=self.rank, local_rank=self.rank, world=self.world)


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to make one step on a batch."""

    batch: Batch


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute the loss of a batch without training."""

    batch: Batch


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``Evaluate``."""

    metrics: dict[str, float]


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer of rank 0: the model is loaded on all ranks."""


Order = TrainBatch | Evaluate | Save
Answer = Loaded | Trained | Evaluated | Saved | Failure


def start_learner(prepared: PreparedTuning, snapshot: str, run_dir: Path, stack: ExitStack) -> StartedLearner:
    """Return the learner of the run ``prepared``: in this process, or on ranks, which are processes of this machine.
    ``snapshot`` is the directory of the snapshot to continue from, or empty. ``stack`` ends the ranks."""
    config, total_steps = prepared.config, prepared.schedule.num_steps
    world = config.learner.parallel.world
    if world == 1:
        device = use("learner.device", config.learner.device, only_cpu=config.model.deterministic)
        core = open_learner(config, SingleRank(device), snapshot, total_steps)
        return StartedLearner(learner=core, devices=(str(device),))
    devices = settle("cpu", config.learner.device, ranks=world, gpus=num_gpus()).learner
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-ranks-")))
    logs = run_dir / LOGS
    logs.mkdir(exist_ok=True)
    starts = [
        RankStart(
            verb=prepared.verb,
            config=config.model_dump(mode="json"),
            snapshot=snapshot,
            total_steps=total_steps,
            device=device,
            num_threads=config.run.threads or max(1, num_cores() // world),
            rank=rank,
            world=world,
            rendezvous=f"file://{place / 'rendezvous'}",
        )
        for rank, device in enumerate(devices)
    ]
    learner = RankedLearner(starts, logs, stack)
    return StartedLearner(learner=learner, devices=devices, pids=tuple(each.pid for each in learner.processes))


def open_learner(config: TuningConfig, ranks: AnyRanks, snapshot: str, total_steps: int) -> LearnerCore:
    """Load the model of ``config``, from its directory or from ``snapshot``, and return the learner of this process,
    which is one of ``ranks``, with its optimizer restored from the snapshot if there is one."""
    model = config.model.at(snapshot) if snapshot else config.model
    objective = objective_of(config)
    context = LearnerContext(
        temperature=1.0, total_steps=total_steps, model_dir=Path(config.model.path), clock=RealClock()
    )  # fmt: skip
    core = LearnerCore(load_for(model, ranks), learner_settings(config, objective), objective, context, ranks)
    if snapshot:
        core.restore(Path(snapshot), weights=config.model.lora is not None)
    return core


# -- the process of the run -------------------------------------------------------------------------------------------


class RankedLearner:
    """The learner of a run as its ranks compute it. Each call sends the same order to all ranks, and returns the answer
    of rank 0, or raises the error of whichever rank reports one."""

    def __init__(self, starts: Sequence[RankStart], logs: Path, stack: ExitStack) -> None:
        """Start a process for each of ``starts``, the settings of the ranks in their order, and wait until all have
        loaded the model. ``logs`` is the directory of their logs; ``stack`` ends the processes."""
        self._codec = MessageCodec(Answer)
        self._spans: list[Span] = []
        self.processes: list[TiedProcess] = []
        self._pipes: list[Connection] = []
        for start in starts:
            pipe, theirs = Pipe()
            process = TiedProcess(
                __name__,
                msgspec.json.encode(start),
                logs / f"learner-{start.rank}.log",
                arguments=[str(theirs.fileno())],
                environment={**child_environment(start.num_threads), **rank_environment(start.place)},
                pass_fds=[theirs.fileno()],
            )
            stack.callback(process.end)
            stack.callback(pipe.close)
            theirs.close()  # so that the end of the process is the end of the pipe
            self.processes.append(process)
            self._pipes.append(pipe)
        self._receive()

    def train(self, batch: Batch) -> StepReport:
        """Make one step on ``batch``, and return its report."""
        answer = self._order(TrainBatch(batch=batch))
        assert isinstance(answer, Trained)
        self._spans += answer.spans
        return answer.report

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss of ``batch`` and the loss's metrics, without training."""
        answer = self._order(Evaluate(batch=batch))
        assert isinstance(answer, Evaluated)
        return answer.metrics

    def save(self, directory: Path) -> None:
        """Write a snapshot into the existing, empty ``directory``; each rank writes its part."""
        answer = self._order(Save(call=0, directory=str(directory)))
        assert isinstance(answer, Saved)
        self._spans += answer.spans

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans of rank 0 that were recorded since the last call, and forget them."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _order(self, order: Order) -> Any:
        """Send ``order`` to all ranks, and return the answer of rank 0."""
        words = self._codec.encode(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(words)
            except OSError:
                raise self._lost(rank) from None
        return self._receive()

    def _receive(self) -> Any:
        """Return the answer of rank 0 to the last order. Raises the error that a rank reports, and
        :class:`~headrace.base.errors.RankLost` if one ends."""
        for pipe in wait(self._pipes):
            assert isinstance(pipe, Connection)
            try:
                answer = self._codec.decode(pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._lost(self._pipes.index(pipe)) from None
            if isinstance(answer, Failure):
                raise error_of(answer)
            return answer
        raise AssertionError("wait returned without a pipe")

    def _lost(self, rank: int) -> HeadraceError:
        """Return the error for the end of ``rank``, whose pipe is closed. The others end because they wait for each
        other, so it is the error that one of them has reported, or names the one that ended by itself."""
        clock = RealClock()
        limit_s = clock.now() + LOST_S
        for other in (rank, *(each for each in range(len(self.processes)) if each != rank)):
            code = self.processes[other].wait(max(0.0, limit_s - clock.now()))
            if (failure := self._failure_of(other)) is not None:
                return error_of(failure)
            if code != EXIT_RANK_LOST:  # it ended by itself, or it is the one for which the others waited in vain
                rank = other
                break
        process, code = self.processes[rank], self.processes[rank].wait(0.0)
        if code is None:
            return RankLost(
                f"rank {rank} of the learner, process {process.pid}, has kept the others waiting for too long "
                "(learner.parallel.timeout_s): it is stopped or hangs",
                remedy=f"look at {process.log} and at the machine; --resume goes on from the last snapshot",
            )
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = process.last_lines()
        return RankLost(
            f"rank {rank} of the learner, process {process.pid}, has ended ({how})" + (f": {words}" if words else ""),
            remedy=f"look at {process.log}; --resume goes on from the last snapshot",
        )

    def _failure_of(self, rank: int) -> Failure | None:
        """Return the failure that ``rank`` has reported and that has not been read yet; ``None`` for none."""
        try:
            answer = self._codec.decode(self._pipes[rank].recv_bytes()) if self._pipes[rank].poll() else None
        except (EOFError, OSError):
            return None
        return answer if isinstance(answer, Failure) else None


# -- the process of a rank --------------------------------------------------------------------------------------------


def main() -> None:
    """Run one rank: read its settings, join the other ranks, and carry out orders that come over the descriptor in the
    first argument, until the run's process closes it."""
    start = msgspec.json.decode(read_order(), type=RankStart)
    exit_with(partial(_run, start, Connection(int(sys.argv[1]))))


def _run(start: RankStart, pipe: Connection) -> int:
    """Run the rank ``start``, report an error that ends it over ``pipe``, and return the exit code. The loss of another
    rank is not reported: the user needs that rank's error."""
    codec = MessageCodec(Order)
    try:
        torch.set_num_threads(start.num_threads)
        config = load_tuning(VERBS[start.verb], start.config)
        device = use("learner.device", start.device)
        joining = joined(config.learner.parallel, start.place, device, start.rendezvous)
        with joining as ranks, _ending_with_the_others(start.rank), gc_frozen():
            _serve(open_learner(config, ranks, start.snapshot, start.total_steps), ranks, pipe, codec)
    except HeadraceError as error:
        traceback.print_exc()
        failure = Failure(call=None, kind=type(error).__name__, problem=error.problem, remedy=error.remedy)
        pipe.send_bytes(codec.encode(failure))
        return EXIT_REPORTED
    return 0


@contextmanager
def _ending_with_the_others(rank: int) -> Iterator[None]:
    """End this process, which is ``rank``, at once if another rank is lost within this context: threads that wait for
    it never end."""
    try:
        with explained_rank_loss(rank):
            yield
    except RankLost:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)


def _serve(core: LearnerCore, ranks: AnyRanks, pipe: Connection, codec: MessageCodec) -> None:
    """Carry out the orders that come over ``pipe`` with the learner ``core``, until it is closed. Rank 0 answers, first
    that the learner is loaded."""
    answer: Answer = Loaded()
    while True:
        if ranks.is_leader:
            pipe.send_bytes(codec.encode(answer))
        try:
            order = codec.decode(pipe.recv_bytes())
        except EOFError:
            return
        answer = _carry_out(core, order)


def _carry_out(core: LearnerCore, order: Order) -> Answer:
    """Carry out ``order``, and return the answer to it."""
    match order:
        case TrainBatch(batch=batch):
            report = core.train(batch)
            return Trained(call=0, report=report, spans=core.take_spans())
        case Evaluate(batch=batch):
            return Evaluated(metrics=core.evaluate(batch))
        case Save(call=call, directory=directory):
            core.save(Path(directory))
            return Saved(call=call, seconds=0.0, spans=core.take_spans())
