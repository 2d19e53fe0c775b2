"""The entry point of every process of a run: ``python -m headrace.launch.hosts.main DIRECTORY PART LIFELINE``, or a
fork that calls the same function (forkserver.py).

The process runs only as long as the other end of the pipe LIFELINE (a file descriptor) is open. When the controller
dies, the process is killed together with all processes that it has started.
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
from headrace.base.heap import gc_disabled
from headrace.base.types.messages import engine, environment, learner, rollout, scorer
from headrace.base.types.messages.controller import Failure
from headrace.launch.channel import PartChannel
from headrace.launch.hosts import EXIT_REPORTED
from headrace.launch.starts import (
    EngineStart,
    EnvironmentStart,
    LearnerStart,
    RolloutStart,
    ScorerStart,
    Start,
    read_briefing,
)


def main(directory: Path, part: str, lifeline: int) -> int:
    """Run the part named ``part``, one of the processes of a run, until the controller orders it to shut down.

    The settings of the part are in the file ``directory``/``part``.json, the briefing. ``lifeline`` is the file
    descriptor of a pipe: the run's secret token is read from it first, and this process is killed when the other end is
    closed. Return the exit code of the process: 0, ``EXIT_REPORTED`` if the part has reported an error to the
    controller, or 1 if it could not connect to the controller.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    read_token(lifeline)  # before the thread starts that treats any byte as the end of the controller
    die_with_starter(lifeline)
    with gc_disabled():
        briefing = read_briefing(directory / f"{part}.json")
        message_type, run = _resolve_role(briefing.start)
    try:
        channel = PartChannel(briefing.addresses, message_type)
    except HeadraceError as error:  # without a channel, the error can only be written to the log
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        run(channel)
    except HeadraceError as error:
        channel.send(_make_failure(type(error).__name__, error.problem, error.remedy))
        return EXIT_REPORTED
    except Exception as error:  # noqa: BLE001 - the edge of the process: the controller tells the user
        traceback.print_exc()
        gpus = _describe_gpus(briefing.start)
        name = f"{part} ({gpus})" if gpus else part
        problem = f"{name} failed: {type(error).__name__}: {error}"
        remedy = f"the traceback is in logs/{part}.log of the run directory"
        channel.send(_make_failure("ComponentDied", problem, remedy))
        return EXIT_REPORTED
    finally:
        channel.close()
    return 0


def _resolve_role(start: Start) -> tuple[Any, Callable[[PartChannel], None]]:
    """Return the type of the messages that a part with the settings ``start`` receives, and the function that runs the
    part over its channel. Heavy modules are imported only for roles that need them."""
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
        case RolloutStart():
            from headrace.launch.hosts.rollout import run_rollout

            return rollout.Message, lambda channel: run_rollout(start, channel)


def _describe_gpus(start: Start) -> str:
    """Return the GPUs, with their machine, on which a part with the settings ``start`` computes, in words; empty if it
    uses no GPU."""
    match start:
        case EngineStart(engine=settings) | LearnerStart(learner=settings):
            from headrace.models.gpus import describe_place  # workers need no models

            return describe_place(str(settings.get("device", "")))
    return ""


def _make_failure(kind: str, problem: str, remedy: str) -> Failure:
    """Return the message that reports a failure of the whole process. ``kind`` is the name of the error's class;
    ``problem`` and ``remedy`` are its texts."""
    problem, remedy = (
        text.encode("utf-8", "replace").decode() for text in (problem, remedy)
    )  # the text of an exception may be invalid Unicode
    return Failure(call=None, kind=kind, problem=problem, remedy=remedy)


def die_with_starter(lifeline: int) -> None:
    """Kill this process and all processes of its group when the other end of the pipe ``lifeline`` is closed. The
    process that started this one holds that end. The kernel sends the signal where this is possible; a thread does so
    everywhere."""
    kill_group_on_close(lifeline)

    def wait() -> None:
        """Wait until the other end of the lifeline is closed, and kill the process group; this is the body of the
        thread."""
        os.read(lifeline, 1)  # returns only when the other end is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()


def kill_group_on_close(lifeline: int) -> None:
    """Make the kernel kill this process group when the other end of ``lifeline`` is closed (Linux only). User code that
    holds the interpreter's lock cannot delay this."""
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def exit_with(entry: Callable[[], int]) -> NoReturn:
    """Call ``entry``, and end this process with the exit code that it returns."""
    code = 1
    try:
        code = entry()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for threads of user code, which may never return


if __name__ == "__main__":
    exit_with(lambda: main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
