"""The learner of a run on given rows: in the process of the run, or spread over ranks, processes of this machine.

    the run ──▶ every rank: the same order (train, evaluate, save) ──▶ all compute it together ──▶ rank 0 answers

A *rank* is one of the processes among which the learner is divided (``learner.parallel``). An *order* is a message from
the run's process to the ranks, and an *answer* is the reply of rank 0.
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
from headrace.launch.clients.peer import make_error
from headrace.launch.hosts import EXIT_RANK_LOST, EXIT_REPORTED
from headrace.launch.hosts.main import exit_with
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.learner.parallel.load import load_on_ranks
from headrace.learner.parallel.mesh import AnyRanks, SingleRank, explained_rank_loss, join_ranks
from headrace.models.devices import choose_devices, num_gpus, use_device
from headrace.wings.supervised.config import VERBS, TuningConfig, load_tuning
from headrace.wings.supervised.preparing import PreparedTuning, learner_settings, make_objective
from headrace.wings.supervised.tied import TiedProcess, read_order

LOGS = "logs"
"""The directory of the processes' logs, in the run directory."""
LOST_S = 10.0
"""The time to wait, after one rank has ended, for another rank whose end was the cause, in seconds."""


class TuningLearner(Protocol):
    """The contract of the learner of a run on given rows; :class:`~headrace.learner.core.LearnerCore` satisfies it."""

    def train(self, batch: Batch) -> StepReport:
        """Train one step on ``batch``, and return its report."""
        ...

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss of ``batch`` and the loss's metrics, without training."""
        ...

    def save(self, directory: Path) -> None:
        """Write a snapshot of weights and optimizer into ``directory``."""
        ...

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans (timings for the event trace) since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedLearner:
    """A learner that has loaded its model, and the devices and processes on which it computes."""

    learner: TuningLearner
    devices: tuple[str, ...]
    """The device of each rank, or of the run's own process."""
    pids: tuple[int, ...] = ()
    """The process id of each rank; empty if the run's own process computes."""


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one rank, which the run's process sends to it at its start."""

    verb: str
    """``sft``, ``dpo`` or ``distill``."""
    config: dict[str, Any]
    """The settings of the run, as JSON data."""
    snapshot: str
    """The directory of the snapshot to continue from; empty for a new run."""
    total_steps: int
    """The number of optimizer steps of the whole run."""
    device: str
    """The device of this rank."""
    num_threads: int
    """The number of threads of its computations."""
    rank: int
    """The index of this rank. Rank 0 answers orders."""
    world: int
    """The number of ranks."""
    rendezvous: str
    """The address at which the ranks meet: torch's ``init_method``."""

    @property
    def place(self) -> RankPlace:
        """The place of this rank among all ranks, which are on one machine."""
        return RankPlace(rank=self.rank, local_rank=self.rank, world=self.world)


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to make one step on a batch."""

    batch: Batch


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The order to compute the loss and the metrics of a batch without training."""

    batch: Batch


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to :class:`Evaluate`: the metrics of its batch."""

    metrics: dict[str, float]


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first answer of rank 0, after all ranks have loaded the model."""


Order = TrainBatch | Evaluate | Save
Answer = Loaded | Trained | Evaluated | Saved | Failure


def start_learner(prepared: PreparedTuning, snapshot: str, run_dir: Path, stack: ExitStack) -> StartedLearner:
    """Return the learner of the run ``prepared``: in this process, or on ranks, which are processes of this machine.
    ``snapshot`` is the directory of the snapshot to continue from, or empty. ``stack`` ends the ranks. ``run_dir`` is
    the directory of the run, in which the ranks write their logs."""
    config, total_steps = prepared.config, prepared.schedule.num_steps
    world = config.learner.parallel.world
    if world == 1:
        device = use_device("learner.device", config.learner.device, only_cpu=config.model.deterministic)
        core = open_learner(config, SingleRank(device), snapshot, total_steps)
        return StartedLearner(learner=core, devices=(str(device),))
    devices = choose_devices("cpu", config.learner.device, ranks=world, gpus=num_gpus()).learner
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
    which is one of ``ranks``, with its optimizer restored from the snapshot if there is one. ``total_steps`` is the
    number of optimizer steps of the whole run."""
    model = config.model.with_snapshot(snapshot) if snapshot else config.model
    objective = make_objective(config)
    context = LearnerContext(
        temperature=1.0, total_steps=total_steps, model_dir=Path(config.model.path), clock=RealClock()
    )  # fmt: skip
    core = LearnerCore(load_on_ranks(model, ranks), learner_settings(config, objective), objective, context, ranks)
    if snapshot:
        core.restore(Path(snapshot), weights=config.model.lora is not None)
    return core


# -- the process of the run -------------------------------------------------------------------------------------------


class RankedLearner:
    """The learner of a run on several ranks. Each call sends the same order to all ranks, and returns the answer of
    rank 0, or raises the error that a rank reports."""

    def __init__(self, starts: Sequence[RankStart], logs: Path, stack: ExitStack) -> None:
        """Start a process for each of ``starts``, and wait until all have loaded the model. ``logs`` is the directory
        of their logs; ``stack`` ends the processes."""
        self._codec = MessageCodec(Answer)
        """The codec of the ranks' answers."""
        self._spans: list[Span] = []
        """Spans of rank 0 that were not taken yet."""
        self.processes: list[TiedProcess] = []
        self._pipes: list[Connection] = []
        """The connection to each rank."""
        for start in starts:
            pipe, rank_end = Pipe()
            process = TiedProcess(
                __name__,
                msgspec.json.encode(start),
                logs / f"learner-{start.rank}.log",
                arguments=[str(rank_end.fileno())],
                environment={**child_environment(start.num_threads), **rank_environment(start.place)},
                pass_fds=[rank_end.fileno()],
            )
            stack.callback(process.end)
            stack.callback(pipe.close)
            rank_end.close()  # so that the pipe ends with the process
            self.processes.append(process)
            self._pipes.append(pipe)
        self._receive()

    def train(self, batch: Batch) -> StepReport:
        """Make one step on ``batch``, and return its report."""
        answer = self._send_order(TrainBatch(batch=batch))
        assert isinstance(answer, Trained)
        self._spans += answer.spans
        return answer.report

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """Return the loss of ``batch`` and the loss's metrics, without training."""
        answer = self._send_order(Evaluate(batch=batch))
        assert isinstance(answer, Evaluated)
        return answer.metrics

    def save(self, directory: Path) -> None:
        """Write a snapshot into ``directory``, which exists and is empty; each rank writes its part."""
        answer = self._send_order(Save(call=0, directory=str(directory)))
        assert isinstance(answer, Saved)
        self._spans += answer.spans

    def take_spans(self) -> tuple[Span, ...]:
        """Return the spans of rank 0 since the last call, and clear them."""
        spans, self._spans = tuple(self._spans), []
        return spans

    def _send_order(self, order: Order) -> Any:
        """Send ``order`` to all ranks, and return the answer of rank 0. Raises the error that a rank reports."""
        words = self._codec.encode(order)
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(words)
            except OSError:
                raise self._rank_error(rank) from None
        return self._receive()

    def _receive(self) -> Any:
        """Return the answer of rank 0 to the last order. Raises the error that a rank reports, or
        :class:`~headrace.base.errors.RankLost` if a rank has ended."""
        for pipe in wait(self._pipes):
            assert isinstance(pipe, Connection)
            try:
                answer = self._codec.decode(pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._rank_error(self._pipes.index(pipe)) from None
            if isinstance(answer, Failure):
                raise make_error(answer)
            return answer
        raise AssertionError("wait returned without a pipe")

    def _rank_error(self, rank: int) -> HeadraceError:
        """Return the error to raise after the pipe of ``rank`` has closed: the error that a rank has reported, or an
        error that names the rank that ended first. The ranks wait for each other, so the end of one rank soon ends all
        of them."""
        clock = RealClock()
        limit_s = clock.now() + LOST_S
        for other in (rank, *(each for each in range(len(self.processes)) if each != rank)):
            code = self.processes[other].wait(max(0.0, limit_s - clock.now()))
            if (failure := self._read_failure(other)) is not None:
                return make_error(failure)
            if code != EXIT_RANK_LOST:  # it ended first, or it still runs and the others waited for it
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

    def _read_failure(self, rank: int) -> Failure | None:
        """Return an unread failure that ``rank`` has reported; ``None`` if there is none."""
        try:
            answer = self._codec.decode(self._pipes[rank].recv_bytes()) if self._pipes[rank].poll() else None
        except (EOFError, OSError):
            return None
        return answer if isinstance(answer, Failure) else None


# -- the process of a rank --------------------------------------------------------------------------------------------


def main() -> None:
    """Run one rank: read its settings, join the other ranks, and carry out the orders from the pipe whose descriptor is
    the first argument, until the run's process closes the pipe."""
    start = msgspec.json.decode(read_order(), type=RankStart)
    exit_with(partial(_run, start, Connection(int(sys.argv[1]))))


def _run(start: RankStart, pipe: Connection) -> int:
    """Run the rank ``start``, report an error of it over ``pipe``, and return the exit code. The loss of another rank
    is not reported, because the user needs that rank's own error."""
    codec = MessageCodec(Order)
    try:
        torch.set_num_threads(start.num_threads)
        config = load_tuning(VERBS[start.verb], start.config)
        device = use_device("learner.device", start.device)
        joining = join_ranks(config.learner.parallel, start.place, device, start.rendezvous)
        with joining as ranks, _exit_on_rank_loss(start.rank), gc_frozen():
            _serve(open_learner(config, ranks, start.snapshot, start.total_steps), ranks, pipe, codec)
    except HeadraceError as error:
        traceback.print_exc()
        failure = Failure(call=None, kind=type(error).__name__, problem=error.problem, remedy=error.remedy)
        pipe.send_bytes(codec.encode(failure))
        return EXIT_REPORTED
    return 0


@contextmanager
def _exit_on_rank_loss(rank: int) -> Iterator[None]:
    """End this process, ``rank``, at once if another rank is lost during the body, because threads that wait for the
    other rank would never end."""
    try:
        with explained_rank_loss(rank):
            yield
    except RankLost:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(EXIT_RANK_LOST)


def _serve(core: LearnerCore, ranks: AnyRanks, pipe: Connection, codec: MessageCodec) -> None:
    """Carry out the orders from ``pipe`` with the learner ``core`` until the pipe is closed. Rank 0 sends the answers,
    the first after the learner is loaded."""
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
