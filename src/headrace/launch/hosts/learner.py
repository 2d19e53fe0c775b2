"""The process of the learner, or of one of its ranks. It executes orders sequentially. A thread hashes new versions
while the next batch is trained, and another thread writes the checkpoints of several ranks.

    controller ──▶ rank 0 ──▶ all ranks: the same order ──▶ each computes its part ──▶ rank 0 answers

A *rank* is one process of a learner that is divided among several processes. A version of the weights is *published* by
copying it into a buffer (slot), hashing it and announcing it to the engines.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from transformers import PreTrainedModel

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.environ import run_token
from headrace.base.errors import ComponentDied, HeadraceError, RankLost, StoreError, WeightsError
from headrace.base.heap import gc_frozen
from headrace.base.types.batch import Batch
from headrace.base.types.messages.codec import MessageCodec, Shutdown
from headrace.base.types.messages.controller import (
    Failure,
    LogprobsReply,
    Published,
    Ready,
    Saved,
    SnapshotTaken,
    StepReport,
    Trained,
    Working,
)
from headrace.base.types.messages.engine import Announce
from headrace.base.types.messages.learner import Divided, Logprobs, Message, Publish, Resend, Save, Train
from headrace.base.types.messages.parts import MessagePart, PartCollector, split_message
from headrace.base.types.outline import BatchOutline
from headrace.base.types.trace import Span
from headrace.base.types.weights import WeightUpdate
from headrace.launch.channel import PartChannel
from headrace.launch.hosts import EXIT_RANK_LOST
from headrace.launch.hosts.batches import ReadBatch, ResultsStore, read, read_outline
from headrace.launch.hosts.facts import machine_facts
from headrace.launch.lending import AnyCores, make_cores
from headrace.launch.starts import LearnerStart, StoreStart
from headrace.learner import LearnerConfig
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.learner.parallel.load import load_on_ranks
from headrace.learner.parallel.mesh import AnyRanks, Ranks, SingleRank, explained_rank_loss, join_ranks
from headrace.learner.parallel.shards import gather_each, local_shard
from headrace.learner.parallel.shares import assign_boxes
from headrace.learner.progress import Progress
from headrace.models.config import ModelConfig
from headrace.models.devices import use_device
from headrace.models.gpus import describe_place
from headrace.models.weights import weight_tensors
from headrace.sync.base import LearnerRank
from headrace.sync.config import Route
from headrace.sync.manifest import plan
from headrace.sync.pieces import TensorBoxes
from headrace.sync.publisher import Publisher
from headrace.sync.transports import make_publisher, sent_by_every_rank

Order = Train | Logprobs | Publish | Resend | Save | Shutdown
"""A message that a learner executes."""
WAIT_S = 60.0
"""The longest time of one wait for orders, in seconds."""
HEARTBEAT_S = 1.0
"""Seconds between two reports to the controller about the current unit of work of this process."""


def run_learner(start: LearnerStart, channel: PartChannel) -> None:
    """Join the other ranks, load the model that ``start`` describes, report over ``channel`` that the learner is ready,
    and execute orders until the order to shut down. If another rank is lost, this process ends with the exit code
    :data:`~headrace.launch.hosts.EXIT_RANK_LOST`."""
    torch.set_num_threads(start.num_threads)
    config = LearnerConfig.model_validate(start.learner)
    device = use_device("learner.device", config.device)
    with join_ranks(config.parallel, start.place, device, start.rendezvous) as ranks:
        try:
            with explained_rank_loss(start.rank):
                _run(start, config, OrderStream(channel, ranks, start.columns))
        except RankLost:
            end_without_rank()


def end_without_rank() -> NoReturn:
    """Write the error that is being handled to the log, and end this process at once with the exit code
    :data:`~headrace.launch.hosts.EXIT_RANK_LOST`. Threads that wait for the lost rank would never end. The user needs
    the error of the lost rank, not the error of this rank."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)


def _run(start: LearnerStart, config: LearnerConfig, orders: OrderStream) -> None:
    """Load the model and, if ``start`` names one, the snapshot from which to continue. Report that the learner is
    ready, and execute ``orders`` until the order to shut down. Every rank runs this function."""
    model_config = ModelConfig.model_validate(start.model)
    model = load_on_ranks(model_config.with_snapshot(start.snapshot) if start.snapshot else model_config, orders.ranks)
    clock = RealClock()
    context = LearnerContext(
        temperature=start.temperature,
        total_steps=start.total_steps,
        model_dir=Path(model_config.path),
        clock=clock,
        progress=Progress(clock),
    )
    objective = Objective.build(AlgoConfig.model_validate(start.algo))
    core = LearnerCore(model, config, objective, context, orders.ranks)
    if start.snapshot:
        core.restore(Path(start.snapshot), weights=model_config.lora is not None)
    weights = PublishedBuffers(model, start.route, orders.ranks)
    facts: dict[str, str | int | float] = {
        **machine_facts(start.num_threads),
        "device": str(orders.ranks.device),
        "place": describe_place(str(orders.ranks.device)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_bytes": plan(weight_tensors(model)).total_bytes,
    }
    orders.channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts))
    with gc_frozen(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="announce") as announcer:
        host = LearnerHost(core, weights, orders, announcer, make_cores(start.lending))
        with heartbeat(orders.channel, context.progress):
            host.serve(context.progress)
    weights.close()


@contextmanager
def heartbeat(channel: PartChannel, progress: Progress) -> Iterator[None]:
    """Report the learner's current unit of work, from ``progress``, to the controller every :data:`HEARTBEAT_S` seconds
    within this context. A thread sends the reports."""
    stopped = threading.Event()

    def beat() -> None:
        """Send a report about the current unit of work every :data:`HEARTBEAT_S` seconds until ``stopped`` is set. This
        is the body of the thread."""
        while not stopped.wait(HEARTBEAT_S):
            channel.send(Working(num_units=progress.num_units, what=progress.unit.what, usual_s=progress.usual_s()))

    thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


class OrderStream:
    """The controller's orders, which every rank receives, and the answers, which rank 0 sends for all ranks."""

    def __init__(self, channel: PartChannel, ranks: AnyRanks, columns: StoreStart | None = None) -> None:
        """Create the stream. Rank 0 receives orders from ``channel``, and the other ranks receive them from rank 0
        through ``ranks``. ``columns`` is the store that may contain columns of batches, if there is one."""
        self.channel = channel
        self.ranks = ranks
        self._columns = columns
        self._results = ResultsStore(columns)
        """The store for the results of large steps."""
        self._codec = MessageCodec(Message)
        """The codec of the messages that rank 0 sends to the other ranks."""

    def receive(self) -> Iterator[Order]:
        """Yield the controller's orders as they arrive; an order that arrives in parts is put together first. All ranks
        receive the same orders. This never ends. Raises :class:`~headrace.base.errors.RunError` if a part of an order
        is missing."""
        parts = PartCollector(Divided)
        for message in self._receive_messages():
            order = parts.add(message) if isinstance(message, MessagePart) else message
            del message  # the last part must not stay in memory while the order is executed
            if order is not None:
                yield order
            del order

    def _receive_messages(self) -> Iterator[Message]:
        """Yield the controller's messages as they arrive. All ranks receive the same messages. This never ends. A
        message is not stored here after it was yielded: it may be a large part of a batch."""
        while True:
            arrived = self._wait_for_messages()
            while arrived:
                if isinstance(self.ranks, Ranks) and self.ranks.is_leader:
                    self.ranks.broadcast(self._codec.encode(arrived[0]))
                yield arrived.popleft()

    def _wait_for_messages(self) -> deque[Message]:
        """Wait for messages and return them: on rank 0 all messages from the channel that have arrived, which it has to
        send to the other ranks one by one, and on another rank the next message from rank 0. Return none if no message
        arrives for a while; rank 0 then sends an empty message to the other ranks, so that they do not reach their time
        limit."""
        if isinstance(self.ranks, SingleRank):
            return deque(self.channel.receive(WAIT_S))
        if not self.ranks.is_leader:
            data = self.ranks.broadcast(None)
            return deque([self._codec.decode(data)] if data else [])
        arrived = deque(self.channel.receive(min(WAIT_S, self.ranks.config.timeout_s / 2)))
        if not arrived:
            self.ranks.broadcast(b"")
        return arrived

    def read(self, batch: Batch) -> ReadBatch:
        """Return the batch of an order with all columns from the store in memory. All ranks must call this at the same
        time."""
        return read(batch, self._columns, self.ranks)

    def read_outline(self, outline: BatchOutline) -> ReadBatch:
        """Return the batch of ``outline`` with all columns from the store in memory. All ranks must call this at the
        same time."""
        return read_outline(outline, self._columns, self.ranks)

    def answer(self, message: Any) -> None:
        """Send ``message`` to the controller if this is rank 0; otherwise do nothing."""
        if self.ranks.is_leader:
            self.channel.send(message)

    def store_results(self, report: StepReport) -> StepReport:
        """Return the report of a step as the controller receives it. On rank 0, results for very many tokens are
        written into the store, and a reference takes their place. Other ranks write nothing, because only rank 0
        answers."""
        return self._results.store(report) if self.ranks.is_leader else report

    def answer_divided(self, message: Trained | LogprobsReply) -> None:
        """Send ``message``, an answer of any size, to the controller in parts if this is rank 0; otherwise do
        nothing."""
        for part in split_message(message, message.call) if self.ranks.is_leader else ():
            self.channel.send(part)


class PublishedBuffers:
    """The buffers through which new versions reach the engines, over the transport ``route``. A *publisher* hashes and
    announces versions. Depending on the transport, rank 0 has a publisher for the tensors of all ranks, or every rank
    has a publisher for its own parts. On ranks without a publisher it is ``None``."""

    def __init__(self, model: PreTrainedModel, route: Route, ranks: AnyRanks) -> None:
        """Open the buffers of the transport ``route`` for the tensors of ``model``: on every rank if each rank sends
        its own parts, and otherwise on rank 0. All ranks must call this at the same time."""
        self._tensors = weight_tensors(model)
        """The tensors of the model, by name; with several ranks, the parts of this rank."""
        self._is_whole = isinstance(ranks, SingleRank)
        """Whether this process has all weights."""
        self._sent_boxes: TensorBoxes | None = None
        """The parts of tensors that this rank sends; ``None`` if rank 0 sends everything."""
        self.publisher: Publisher | None = None
        """The publisher of this rank; ``None`` if it has none."""
        if sent_by_every_rank(route):
            shares = assign_boxes(self._tensors, ranks)
            self._sent_boxes = shares[ranks.rank]
            rank = LearnerRank(index=ranks.rank, world=len(shares), share=ranks.broadcast)
            self.publisher = make_publisher(route, self._tensors, run_token(), shares, rank)
        elif ranks.is_leader:
            self.publisher = make_publisher(route, self._tensors, run_token())

    def copy(self, slot: int) -> None:
        """Copy the current weights into the buffer with the index ``slot``. All ranks must call this at the same time,
        because each rank may have a part of every tensor."""
        if self._sent_boxes is not None and self.publisher is not None:
            self.publisher.fill(slot, (local_shard(self._tensors[name].detach()) for name in self._sent_boxes))
            return
        if self._is_whole and self.publisher is not None:
            self.publisher.copy(slot)
            return
        gathered = (tensor for _, tensor in gather_each(self._tensors.items()))
        if self.publisher is not None:
            self.publisher.fill(slot, gathered)
        else:
            deque(gathered, maxlen=0)  # gathering needs all ranks; the tensors are dropped

    def close(self) -> None:
        """Remove the buffers."""
        if self.publisher is not None:
            self.publisher.close()


class LearnerHost:
    """The loop of a learner's process, or of one rank. It executes the controller's orders with the learner ``core``,
    and answers them. ``announcer`` is the thread in which versions are hashed and announced. ``cores`` are the cores on
    which the learner computes."""

    def __init__(
        self,
        core: LearnerCore,
        weights: PublishedBuffers,
        orders: OrderStream,
        announcer: ThreadPoolExecutor,
        cores: AnyCores,
    ) -> None:
        """Create the loop; :meth:`serve` runs it. The class describes the arguments; ``weights`` are the buffers for
        new versions, and ``orders`` are the controller's orders."""
        self._core = core
        self._weights = weights
        self._orders = orders
        self._announcer = announcer
        self._cores = cores
        self._clock = RealClock()
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        """The thread in which checkpoints are written."""
        self._saving: Future[None] | None = None
        """The work of that thread; ``None`` before the first checkpoint."""

    def serve(self, progress: Progress) -> None:
        """Execute orders sequentially, each shown in ``progress``. Return after the order to shut down, when the last
        checkpoint is written."""
        with self._saver:
            self._serve(progress)
            self._wait_for_saving()

    def _serve(self, progress: Progress) -> None:
        """Execute orders sequentially, each shown in ``progress``. Return on the order to shut down."""
        self._cores.mark_waiting()
        for message in self._orders.receive():
            if isinstance(message, Shutdown):
                return
            unit = progress.track(type(message).__name__, _describe(message))
            with unit, self._cores.unit(message.outline.num_tokens if isinstance(message, Train) else None):
                self._answer(message.call, partial(self._handle, message))
            del message  # it may hold a batch, and the parts of the next order arrive while this loop waits
            self._cores.mark_waiting()

    def _handle(self, message: Order) -> None:
        """Execute one order of the controller, and answer it with the result. The order to publish has a second answer,
        which a thread sends when the version is announced."""
        match message:
            case Train(call=call, outline=outline):
                loaded = self._orders.read_outline(outline)
                outline.release()  # the batch has copies of its columns
                report = self._orders.store_results(loaded.complete_report(self._core.train(loaded.batch)))
                self._orders.answer_divided(Trained(call=call, report=report, spans=self._core.take_spans()))
            case Logprobs(call=call, batch=batch):
                loaded = self._orders.read(batch)
                if loaded.lost:
                    raise StoreError(loaded.lost[0].why, remedy="look at the folder 'columns' of the run's directory")
                self._orders.answer_divided(LogprobsReply(call=call, logprobs_N=self._core.logprobs(loaded.batch)))
            case Publish():
                self._publish(message)
            case Resend():
                self._announce_soon(message)
            case Save():
                self._save(message)

    def _save(self, order: Save) -> None:
        """Copy the data of a checkpoint, answer that training can continue, and let the saving thread write the
        checkpoint, which sends a second answer. The previous checkpoint is completed first, so that only one copy
        exists at a time."""
        self._wait_for_saving()
        start_s = self._clock.now()
        write_rest = self._core.begin_save(Path(order.directory))
        seconds = self._clock.now() - start_s
        self._orders.answer(SnapshotTaken(call=order.call, seconds=seconds, spans=self._core.take_spans()))
        self._saving = self._saver.submit(self._write, order, write_rest)

    def _wait_for_saving(self) -> None:
        """Wait until the saving thread has finished its work. Raises an unexpected error of that thread."""
        if self._saving is not None:
            self._saving.result()

    def _write(self, order: Save, write_rest: Callable[[], None]) -> None:
        """Call ``write_rest``, which writes the remaining parts of a checkpoint, and answer the order with the duration
        or with the error. This runs in the saving thread. If another rank is lost, this process ends."""

        def work() -> None:
            """Write the checkpoint and send the answer."""
            start_s = self._clock.now()
            write_rest()
            end_s = self._clock.now()
            span = Span(lane="checkpoint", name="write", start_s=start_s, end_s=end_s)
            self._orders.answer(Saved(call=order.call, seconds=end_s - start_s, spans=(span,)))

        try:
            with explained_rank_loss(self._orders.ranks.rank):
                self._answer(order.call, work)
        except RankLost:
            end_without_rank()

    def _publish(self, message: Publish) -> None:
        """Copy the weights into the buffer that the order names, answer with the duration of the copy, and let the
        announcing thread announce the new version."""
        start_s = self._clock.now()
        self._weights.copy(message.slot)
        end_s = self._clock.now()
        span = Span(lane="learner", name="snapshot", start_s=start_s, end_s=end_s, step=message.version)
        self._orders.answer(SnapshotTaken(call=message.call, seconds=end_s - start_s, spans=(span,)))
        self._announce_soon(message)

    def _announce_soon(self, message: Publish | Resend) -> None:
        """Let the announcing thread announce or resend the version of ``message``. A rank without a publisher does
        nothing."""
        if self._weights.publisher is not None:
            announce = partial(self._announce, message, self._weights.publisher)
            self._announcer.submit(self._answer, message.call, announce)

    def _announce(self, message: Publish | Resend, publisher: Publisher) -> None:
        """Hash and announce a version, or send it again as complete weights. Announce it to the engines on this
        machine, and answer the order with the update. This runs in the announcing thread. Raises
        :class:`~headrace.base.errors.WeightsError` if it fails."""
        is_resend = isinstance(message, Resend)
        try:
            update = (publisher.resend if is_resend else publisher.announce)(message.version, message.slot, message.to)
        except HeadraceError:
            raise
        except Exception as error:  # the edge of a thread: the controller waits for the answer
            traceback.print_exc()
            problem = f"publishing version {message.version} failed: {type(error).__name__}: {error}"
            raise WeightsError(problem, remedy="the traceback is in logs/learner.log of the run directory") from error
        if isinstance(message, Publish) and self._orders.ranks.is_leader:
            update = self._announce_to_engines(update, message)
        self._orders.answer(Published(call=message.call, update=update))

    def _announce_to_engines(self, update: WeightUpdate, order: Publish) -> WeightUpdate:
        """Send the announcement of ``update`` to the engines that ``order`` names, and return ``update`` with the
        addresses of these engines. Engines that the weights have not reached are left to the controller."""
        addresses = tuple(
            orders_address
            for orders_address, weights_address in order.announce_to.items()
            if weights_address not in update.missed_by
        )
        update = msgspec.structs.replace(update, announced_to=addresses)
        # No engine has an unread announcement: the engines in step have staged the last version.
        self._orders.channel.send_to(addresses, Announce(update=update, commit=order.commit))
        return update

    def _answer(self, call: int, work: Callable[[], Any]) -> None:
        """Call ``work`` for the order ``call``. If it fails, the error is sent to the controller as the answer and the
        learner continues; only the loss of a rank ends the learner."""
        try:
            work()
        except ComponentDied:
            raise
        except HeadraceError as error:
            kind, problem, remedy = type(error).__name__, error.problem, error.remedy
            self._orders.answer(Failure(call=call, kind=kind, problem=problem, remedy=remedy))


def _describe(order: Order) -> str:
    """Return a description of an order as a unit of work, such as ``step 12``, for the heartbeat."""
    match order:
        case Train(outline=outline):
            return f"step {outline.step}"
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
