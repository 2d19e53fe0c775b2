"""The entry of every process of a run: ``python -m headrace.launch.hosts.main DIRECTORY PART LIFELINE``, or a fork that
becomes the same (forkserver.py).

It lives as long as the pipe LIFELINE (a file descriptor) is open at the other end: when the controller dies, so does
it, and what it has started.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from headrace.base.environ import read_token
from headrace.base.errors import HeadraceError
from headrace.base.heap import growing_heap
from headrace.base.types.messages import engine, environment, learner, scorer
from headrace.base.types.messages.controller import Failure
from headrace.launch.channel import PartChannel
from headrace.launch.hosts import SPOKE
from headrace.launch.starts import EngineStart, EnvironmentStart, LearnerStart, ScorerStart, Start, read_briefing


def main(directory: Path, part: str, lifeline: int) -> int:
    """Be the part that ``directory``/``part``.json describes, until told to shut down; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to answer
    read_token(lifeline)  # before anything of it is taken for the controller's end
    _die_with_controller(lifeline)
    with growing_heap():
        briefing = read_briefing(directory / f"{part}.json")
        receives, run = _role(briefing.start)
    try:
        channel = PartChannel(briefing.ends, receives)
    except HeadraceError as error:  # nobody can be told but whoever reads the log
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        run(channel)
    except HeadraceError as error:
        channel.send(_failure(type(error).__name__, error.problem, error.remedy))
        return SPOKE
    except Exception as error:  # noqa: BLE001 - the edge of the process: the controller tells the user
        traceback.print_exc()
        words = f"{part} failed: {type(error).__name__}: {error}"
        channel.send(_failure("ComponentDied", words, f"the traceback is in logs/{part}.log of the run directory"))
        return SPOKE
    finally:
        channel.close()
    return 0


def _role(start: Start) -> tuple[Any, Callable[[PartChannel], None]]:
    """Messages it receives, and its loop; heavy imports only for the role that needs them."""
    match start:
        case EngineStart():
            from headrace.launch.hosts.engine import run_engine

            return engine.Message, lambda channel: run_engine(start, channel)
        case LearnerStart():
            from headrace.launch.hosts.learner import run_learner

            return learner.Message, lambda channel: run_learner(start, channel)
        case ScorerStart():
            from headrace.launch.hosts.scorer import run_scorer

            return scorer.Message, lambda channel: run_scorer(start, channel)
        case EnvironmentStart():
            from headrace.launch.hosts.environment import run_environment

            return environment.Message, lambda channel: run_environment(start, channel)


def _failure(kind: str, problem: str, remedy: str) -> Failure:
    problem, remedy = (text.encode("utf-8", "replace").decode() for text in (problem, remedy))  # whatever was raised
    return Failure(call=None, kind=kind, problem=problem, remedy=remedy)


def _die_with_controller(lifeline: int) -> None:
    """Kill this process group when the other end of ``lifeline`` is closed."""
    bind_to(lifeline)

    def wait() -> None:
        os.read(lifeline, 1)  # returns only when the other end is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


def bind_to(lifeline: int) -> None:
    """On Linux the kernel kills this process group: foreign code that holds the interpreter's lock cannot delay it."""
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def end_with(life: Callable[[], int]) -> NoReturn:
    """Live it, and end this process with the exit code that it comes to."""
    code = 1
    try:
        code = life()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the user's code may never return


if __name__ == "__main__":
    end_with(lambda: main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
