"""The running of tests: what they print goes to files of the session, and its last part is read, so that no amount of
it ends them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.rollout.scoring.sandbox import Reason
from headrace.rollout.scoring.sandbox.base import MIB
from headrace.wings.sandboxes.base import SandboxSession

FOLDER = "/tmp/headrace/tests"
"""The folder of a session with what tests print."""
KEPT_BYTES = 16 * MIB
"""The most that is read of it: a line for each of thousands of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsRun:
    """The end of a run of tests."""

    __test__ = False  # no class of tests

    stdout: str
    """The last part of what they printed to their standard output."""
    ended: str = ""
    """The limit that ended them; empty: none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsReward:
    """The reward of an episode."""

    __test__ = False

    reward: float
    """What its tests say."""
    ended: str = ""
    """Why the tests did not come to their end; empty: they did."""

    @property
    def columns(self) -> dict[str, str | float]:
        """What is shown with the episode's last answer."""
        return {"tests": f"ended: {self.ended}"} if self.ended else {}


async def run_tests(session: SandboxSession, command: str, wall_s: float) -> TestsRun:
    """Run tests by a command, for ``wall_s`` seconds at most; processes that they leave are ended."""
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
