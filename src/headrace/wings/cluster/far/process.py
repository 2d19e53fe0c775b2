"""A process on another machine, as the run sees it through its supervisor: an object on that machine that starts the
process, watches it, and takes it with it when it ends. Its methods are called from here over the network."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.wings.cluster.far.supervisor import FarExit

METER_S = 1.0
"""Longest wait for a reading of processor time, in seconds."""
MAX_REASON_BYTES = 200
"""Largest size in bytes of the reason why a process cannot continue; the rest is cut off."""
KILL_S = 30.0
"""Longest wait, in seconds, for the report that a killed process has ended; after it the process counts as lost."""


class SupervisorLost(Exception):
    """The error of a supervisor that has ended or cannot be reached. Its text gives the reason."""


class SupervisorUnusable(Exception):
    """The error of a supervisor that cannot be made on its machine, or that does not answer as it should, so that
    trying again would not help. Its text gives the reason."""


class SupervisorHandle(Protocol):
    """A handle of a :class:`~headrace.wings.cluster.far.supervisor.ProcessSupervisor` on another machine, which is an
    actor of Ray or a part of ``headrace join``."""

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the supervisor, and return a future of its result.

        The future fails with :class:`SupervisorLost` if the supervisor has ended or cannot be reached, with
        :class:`SupervisorUnusable` if it cannot be made on its machine or does not answer as it should.
        """
        ...

    def kill(self) -> None:
        """End the supervisor, and its process with it."""
        ...


async def in_time(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    """Wait up to ``timeout_s`` seconds for ``answer``, the future of a call of a supervisor, and return its result.
    Raises the error of the call, :class:`SupervisorLost` or :class:`SupervisorUnusable`, or ``TimeoutError``."""
    await asyncio.wait([answer], timeout=timeout_s)
    if not answer.done():
        raise TimeoutError
    return answer.result()


class FarProcess:
    """A process of the run on another machine, with the interface of :class:`~headrace.launch.child.Process`. ``pid``
    is its id there and ``node`` the address of the machine. ``kept`` says that its resources are limited, and that it
    is killed at its end instead of being told to shut down."""

    def __init__(self, supervisor: SupervisorHandle, pid: int, node: str, *, kept: bool) -> None:
        """Make the handle of a process that ``supervisor`` has started, and ask the supervisor to report its end."""
        self._supervisor, self._pid, self._node, self._kept = supervisor, pid, node, kept
        self._end: asyncio.Future[FarExit] = asyncio.get_running_loop().create_future()
        supervisor.call("ended").add_done_callback(self._learn_end)

    @property
    def pid(self) -> int:
        """The process id on its machine."""
        return self._pid

    @property
    def node(self) -> str:
        """The address of its machine."""
        return self._node

    @property
    def working_pid(self) -> int:
        """The id of the process that does the work, which is the same process here."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        return self._end.result().code if self._end.done() else None

    @property
    def accepts_shutdown(self) -> bool:
        """Whether the process ends by itself when it is asked to shut down; otherwise it is killed."""
        return not self._kept

    async def wait(self) -> int:
        """Wait until the process has ended or is lost, and return its exit code."""
        await asyncio.wait([self._end])
        return self._end.result().code

    async def kill(self) -> None:
        """Kill the process by ending its supervisor, and wait up to :data:`KILL_S` seconds until its machine reports
        the end."""
        self._supervisor.kill()  # this closes the pipe to the process, which then ends
        await asyncio.wait([self._end], timeout=KILL_S)
        if not self._end.done():
            self._end.set_result(_gone("was ended, and its machine does not say that it is gone"))

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 if its machine does not answer."""
        try:
            return float(await in_time(self._supervisor.call("computed_s"), METER_S))
        except (SupervisorLost, SupervisorUnusable, TimeoutError):
            return 0.0

    async def halted(self) -> str:
        """Return why the process makes no progress, such as a signal that stopped it, as its machine reports it; empty
        if it is not halted, or if that is not known."""
        try:
            words: bytes = await in_time(self._supervisor.call("halted"), METER_S)
        except (SupervisorLost, SupervisorUnusable, TimeoutError):
            return ""
        return words[:MAX_REASON_BYTES].decode("utf-8", "replace")

    def ending(self) -> str:
        """Return how the process ended, in words that follow its name."""
        return self._end.result().words

    def last_lines(self, log: Path) -> list[str]:
        """Return the last lines of its log, which its machine sent when it ended."""
        return self._end.result().lines

    def close(self) -> None:
        """End the supervisor, after the end of the process."""
        self._supervisor.kill()

    def _learn_end(self, answer: asyncio.Future[Any]) -> None:
        """Note how the process ended, from the result of its supervisor's method ``ended``, or from the error of that
        call."""
        if self._end.done() or answer.cancelled():
            return
        error = answer.exception()
        ended = _gone(str(error)) if error is not None else msgspec.json.decode(answer.result(), type=FarExit)
        self._end.set_result(ended)


def _gone(words: str) -> FarExit:
    """Return the end of a process of which its machine cannot report any more; it counts as killed."""
    return FarExit(code=-signal.SIGKILL, words=words, lines=[])
