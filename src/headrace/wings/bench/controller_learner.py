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
"""The name of the part."""


class TimedClient(LearnerClient):
    """A client that notes when each step has ended."""

    ends: list[tuple[float, float, int]]
    """For each step: the time, the processor time of this process, and the tokens trained until then."""
    channel: ControllerChannel
    trained_tokens = 0
    """The number of tokens that carried loss, of all steps."""
    lost_tokens = 0
    """The number of tokens that carried no loss because they could not be read."""

    def figures(self) -> dict[str, float]:
        """Return the figures of the steps: tokens, and the size of the largest message to or from the learner."""
        return {
            "largest_message_mb": self.channel.largest_bytes / 2**20,
            "trained_tokens": self.trained_tokens,
            "lost_tokens": self.lost_tokens,
        }

    async def step(self, outline: BatchOutline) -> StepReport:
        """Let the learner make a step, and note its end."""
        report = await super().step(outline)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.trained_tokens += report.trained_tokens
        self.lost_tokens += report.dropped_tokens.get(COLUMNS_LOST, 0)
        before = self.ends[-1][2] if self.ends else 0
        self.ends.append((RealClock().now(), used.ru_utime + used.ru_stime, before + outline.num_tokens))
        return report


def open_learner(directory: Path, stack: ExitStack, token: str) -> TimedClient:
    """Start the process of a learner, and return its client, which is not ready yet. ``token`` is the secret of the
    run."""
    channel = ControllerChannel(directory, NAME, reports.Message)
    client = TimedClient(NAME, channel, token=token, on_spans=lambda spans: None, deadline_s=120.0)
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


def end_learner(client: TimedClient) -> None:
    """Order the process of ``client`` to end, and close the client."""
    client.send(Shutdown())
    client.close()
