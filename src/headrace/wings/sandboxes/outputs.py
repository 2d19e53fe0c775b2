"""Runs the tests of a task. Their output is written to files of the session, and only the last part is read, so that
the limit of a command's output does not end the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.rollout.scoring.sandbox import Reason
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSession

FOLDER = "/tmp/headrace/tests"
"""The folder in a session for the output of tests."""
KEPT_BYTES = 16 * MIB
"""The largest number of bytes of output that are read; this is enough for thousands of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsRun:
    """The result of one run of tests."""

    __test__ = False  # pytest must not collect it

    stdout: str
    """The last part of the standard output."""
    ended: str = ""
    """The limit that ended the tests; empty if none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsReward:
    """The reward of an episode, as its tests determine it."""

    __test__ = False

    reward: float
    """The reward; 1.0 usually means that all tests passed."""
    ended: str = ""
    """Why the tests did not finish; empty if they finished."""

    @property
    def columns(self) -> dict[str, str | float]:
        """The columns that are recorded with the episode's last answer."""
        return {"tests": f"ended: {self.ended}"} if self.ended else {}


async def run_tests(session: SandboxSession, command: str, wall_s: float) -> TestsRun:
    """Run tests in ``session`` with the shell command ``command``, for at most ``wall_s`` seconds, and kill the
    processes that they leave."""
    directory = session.directory
    await session.run(f"chmod -R u+rwX {FOLDER}; rm -rf {FOLDER}; mkdir -p {FOLDER}")
    session.directory = directory
    limits = replace(session.spec.limits, wall_s=wall_s)
    done = await session.run(f"(\n{command}\n) > {FOLDER}/stdout 2> {FOLDER}/stderr", limits=limits)
    await session.end_background()
    limits = replace(session.spec.limits, output_bytes=KEPT_BYTES + 1)
    last = await session.run_apart(f"tail -c {KEPT_BYTES} {FOLDER}/stdout", limits=limits)
    ended = "" if done.reason in (Reason.EXITED, Reason.SIGNALLED) else done.reason.replace("_", " ")
    return TestsRun(stdout=last.stdout.decode("utf-8", "replace"), ended=ended)
