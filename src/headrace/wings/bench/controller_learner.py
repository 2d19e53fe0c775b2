"""The controller's side of a learner without a model (:mod:`~headrace.wings.bench.controller_learner_worker`) in the
controller benchmark."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from headrace.base.clock import RealClock
from headrace.base.store import COLUMNS_LOST
from headrace.base.types.messages import controller as reports
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import StepReport
from headrace.base.types.outline import BatchOutline
from headrace.launch.channel import ControllerChannel
from headrace.launch.clients.learner import LearnerClient

NAME = "learner"
"""The name of the learner among the parts of a run."""


class TimedLearnerClient(LearnerClient):
    """A client of the learner that records the end of each step."""

    ends: list[tuple[float, float, int]]
    """For each step: the time of its end and the processor time of this process until then, both in seconds, and the
    number of tokens trained until then."""
    channel: ControllerChannel
    trained_tokens = 0
    """The number of tokens that carried loss in all steps."""
    lost_tokens = 0
    """The number of tokens that carried no loss because they could not be read."""

    def figures(self) -> dict[str, float]:
        """Return the figures of the steps: the size of the largest message to or from the learner, in MiB, and the
        numbers of trained and lost tokens."""
        return {
            "largest_message_mb": self.channel.largest_bytes / 2**20,
            "trained_tokens": self.trained_tokens,
            "lost_tokens": self.lost_tokens,
        }

    async def step(self, outline: BatchOutline) -> StepReport:
        """Order the learner to make one step on the batch of ``outline``, and record the end of the step."""
        report = await super().step(outline)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.trained_tokens += report.trained_tokens
        self.lost_tokens += report.dropped_tokens.get(COLUMNS_LOST, 0)
        before = self.ends[-1][2] if self.ends else 0
        self.ends.append((RealClock().now(), used.ru_utime + used.ru_stime, before + outline.num_tokens))
        return report


def open_learner(directory: Path, stack: ExitStack, token: str) -> TimedLearnerClient:
    """Start the process of a learner in the run ``directory``, and return its client, which may not be ready yet. The
    process ends when ``stack`` is closed. ``token`` is the secret of the run."""
    channel = ControllerChannel(directory, NAME, reports.Message)
    client = TimedLearnerClient(NAME, channel, token=token, on_spans=lambda spans: None, deadline_s=120.0)
    client.ends, client.channel = [], channel
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.wings.bench.controller_learner_worker", str(directory)],
        stdin=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    process.stdin.write(f"{token}\n")
    process.stdin.flush()
    return client


def end_learner(client: TimedLearnerClient) -> None:
    """Order the process of ``client`` to end, and close the client."""
    client.send(Shutdown())
    client.close()
