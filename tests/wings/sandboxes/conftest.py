"""One driver of each local kind for the tests of a module, with calls that wait for its event loop."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from headrace.rollout.scoring.sandbox import Finished, SandboxLimits
from headrace.wings.sandboxes import LIMITS, SandboxDriver, SandboxSession, SandboxSpec, open_sandboxes

T = TypeVar("T")
KINDS = ("jail", "bubblewrap")


class Sandboxes:
    """A driver in an event loop of its own."""

    def __init__(self, kind: str, runner: asyncio.Runner) -> None:
        self.kind = kind
        self._runner = runner
        self.driver: SandboxDriver = self(open_sandboxes(kind))

    def __call__(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def start(self, limits: SandboxLimits = LIMITS, **spec: Any) -> SandboxSession:
        return self(self.driver.start(SandboxSpec(limits=limits, **spec)))

    def python(self, session: SandboxSession, code: str) -> Finished:
        """Run a program of this Python in a session."""
        self(session.write({"/tmp/main.py": textwrap.dedent(code)}))
        return self(session.run(f"{sys.executable} -I -B /tmp/main.py"))


@pytest.fixture(scope="module", params=KINDS)
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    with asyncio.Runner() as runner:
        made = Sandboxes(request.param, runner)
        yield made
        made(made.driver.close())


@pytest.fixture
def session(sandboxes: Sandboxes) -> Iterator[SandboxSession]:
    started = sandboxes.start()
    yield started
    sandboxes(started.stop())


@pytest.fixture(scope="module")
def long_session(sandboxes: Sandboxes) -> SandboxSession:
    """One session for many tests, each of which must leave it as it was: able to work."""
    return sandboxes.start()
