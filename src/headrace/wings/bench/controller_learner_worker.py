"""The process of a learner without a model for the controller benchmark. It lays out every batch as a real learner does
and reads all columns of the batch, but trains nothing.

    python -m headrace.wings.bench.controller_learner_worker DIRECTORY

DIRECTORY contains the sockets of the part ``learner`` and the store of the run. The process reads the secret of the run
from its standard input, and ends when the controller orders it to end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace.base.clock import RealClock
from headrace.base.store import COLUMNS
from headrace.base.types.batch import Batch
from headrace.base.types.messages.controller import Ready, StepReport
from headrace.base.types.messages.learner import Message
from headrace.base.types.tokens import FloatColumn
from headrace.base.types.trace import Span
from headrace.base.types.weights import Manifest, WeightUpdate
from headrace.launch.channel import PartChannel, local_addresses
from headrace.launch.hosts.learner import LearnerHost, OrderStream
from headrace.launch.lending import OwnCores
from headrace.launch.starts import StoreStart
from headrace.learner.parallel.mesh import SingleRank
from headrace.learner.progress import Progress
from headrace.wings.bench.controller_learner import NAME


class IdleCore:
    """A learner's core that computes nothing. Its log-probabilities are equal to the engine's log-probabilities."""

    def train(self, batch: Batch) -> StepReport:
        """Return the report of a step on ``batch``. Raises ``ValueError`` if the experts do not fit the tokens."""
        problem = batch.routing.problem(batch.num_tokens) if batch.routing is not None else ""
        if problem:
            raise ValueError(problem)
        return StepReport(
            step=batch.step,
            metrics={},
            trained_tokens=batch.num_loss_tokens,
            dropped_tokens={},
            log_pi_N=batch.logprobs_N,
            seconds=0.0,
        )

    def logprobs(self, batch: Batch) -> FloatColumn:
        """Return the log-probabilities that the engine recorded for the tokens of ``batch``."""
        return batch.logprobs_N

    def begin_save(self, directory: Path) -> Callable[[], None]:
        """Return a function that writes nothing to ``directory``, because there are no weights."""
        return lambda: None

    def take_spans(self) -> Sequence[Span]:
        """Return no spans."""
        return ()


class IdleBuffers:
    """Weight buffers that are empty. The object is also their publisher."""

    @property
    def publisher(self) -> IdleBuffers:
        """Return the publisher, which is this object itself."""
        return self

    def copy(self, slot: int) -> None:
        """Copy nothing into ``slot``, because there are no weights."""

    def announce(self, version: int, slot: int, to: Sequence[str]) -> WeightUpdate:
        """Return the update of ``version`` in ``slot``, without weights. ``to`` is ignored."""
        return WeightUpdate(
            version=version, slot=slot, path="", manifest=Manifest(entries=(), total_bytes=0), checksums=()
        )  # fmt: skip

    resend = announce


def serve(directory: Path, token: str) -> None:
    """Execute the orders of the controller until it sends the order to shut down. ``directory`` has the sockets and the
    store of columns; ``token`` is the secret of the run."""
    (reports_socket,) = directory.glob(f"{NAME}.*.reports")
    channel = PartChannel(local_addresses(directory, reports_socket.stem), Message)
    orders = OrderStream(channel, SingleRank(torch.device("cpu")), StoreStart(directory=str(directory / COLUMNS)))
    channel.send(Ready(token=token, pid=os.getpid(), facts={}))
    with ThreadPoolExecutor(max_workers=1) as announcer:
        host = LearnerHost(IdleCore(), IdleBuffers(), orders, announcer, OwnCores())  # type: ignore[arg-type]
        host.serve(Progress(RealClock()))
    channel.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.stdin.readline().strip())
