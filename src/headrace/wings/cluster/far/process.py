"""The controller's handle of a process on another machine. The controller calls the methods of the process's supervisor
over the network: an object on that machine that starts the process and supervises it. When the supervisor ends, the
process ends too."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.wings.cluster.far.supervisor import FarExit

METER_S = 1.0
"""Longest wait for the answer to a query about the process, such as its processor time, in seconds."""
MAX_REASON_BYTES = 200
"""Largest size in bytes of the reason why a process makes no progress; longer reasons are cut."""
KILL_S = 30.0
"""Longest wait, in seconds, for the report that a killed process has ended; after this time the process counts as
lost."""


class SupervisorLost(Exception):
    """The error of a supervisor that has ended or cannot be reached. Its text gives the reason."""


class SupervisorUnusable(Exception):
    """The error of a supervisor that cannot be created on its machine, or that sends invalid answers. A retry would not
    help. Its text gives the reason."""


class SupervisorHandle(Protocol):
    """A handle of a :class:`~headrace.wings.cluster.far.supervisor.ProcessSupervisor` on another machine. The
    supervisor is a Ray actor, or an object in the program ``headrace join``."""

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the supervisor, and return a future of its result.

        The future fails with :class:`SupervisorLost` if the supervisor has ended or cannot be reached, and with
        :class:`SupervisorUnusable` if it cannot be created on its machine or sends invalid answers.
        """
        ...

    def kill(self) -> None:
        """End the supervisor and its process."""
        ...


async def wait_for_answer(answer: asyncio.Future[Any], timeout_s: float) -> Any:
    """Wait up to ``timeout_s`` seconds for ``answer``, the future of a supervisor's method call, and return the result.
    Raises the error of the call (:class:`SupervisorLost` or :class:`SupervisorUnusable`), or ``TimeoutError``. The
    future is not cancelled."""
    await asyncio.wait([answer], timeout=timeout_s)
    if not answer.done():
        raise TimeoutError
    return answer.result()


class FarProcess:
    """A process of the run on another machine, with the interface of :class:`~headrace.launch.child.Process`."""

    def __init__(self, supervisor: SupervisorHandle, pid: int, node: str, *, kept: bool) -> None:
        """Create the handle of a process that ``supervisor`` has started, and request a report of the process's end.
        ``pid`` is the process id on the machine with the address ``node``. ``kept``: the process runs with limited
        resources, and is killed at its end instead of being asked to shut down."""
        self._supervisor, self._pid, self._node, self._is_limited = supervisor, pid, node, kept
        self._exit: asyncio.Future[FarExit] = asyncio.get_running_loop().create_future()
        """The end of the process, once it is reported, or once the process counts as lost."""
        supervisor.call("wait_until_ended").add_done_callback(self._record_end)

    @property
    def pid(self) -> int:
        """The process id on the process's machine."""
        return self._pid

    @property
    def node(self) -> str:
        """The address of the process's machine."""
        return self._node

    @property
    def working_pid(self) -> int:
        """The id of the process that does the work; here it is equal to :attr:`pid`."""
        return self._pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        return self._exit.result().code if self._exit.done() else None

    @property
    def accepts_shutdown(self) -> bool:
        """Whether the process shuts down on request; otherwise it must be killed."""
        return not self._is_limited

    async def wait(self) -> int:
        """Wait until the process has ended or is lost, and return its exit code."""
        await asyncio.wait([self._exit])
        return self._exit.result().code

    async def kill(self) -> None:
        """Kill the process by ending its supervisor, and wait up to :data:`KILL_S` seconds for the report of the
        process's end. Without a report, the process counts as lost."""
        self._supervisor.kill()  # this closes the pipe to the process, which then ends
        await asyncio.wait([self._exit], timeout=KILL_S)
        if not self._exit.done():
            self._exit.set_result(_make_lost_exit("was ended, and its machine does not say that it is gone"))

    async def computed_s(self) -> float:
        """Return the seconds of processor time that the process has used; 0 if its machine does not answer."""
        try:
            return float(await wait_for_answer(self._supervisor.call("computed_s"), METER_S))
        except (SupervisorLost, SupervisorUnusable, TimeoutError):
            return 0.0

    async def halt_reason(self) -> str:
        """Return the reason why the process makes no progress, such as a signal that has stopped it, as its machine
        reports it. Return an empty text if the process is not halted or its machine does not answer."""
        try:
            words: bytes = await wait_for_answer(self._supervisor.call("halt_reason"), METER_S)
        except (SupervisorLost, SupervisorUnusable, TimeoutError):
            return ""
        return words[:MAX_REASON_BYTES].decode("utf-8", "replace")

    def describe_end(self) -> str:
        """Return how the process has ended, in words that follow its name in a sentence. The process must have
        ended."""
        return self._exit.result().words

    def last_lines(self, log: Path) -> list[str]:
        """Return the last lines of the process's log, which its machine has sent with the report of its end. The path
        ``log`` is ignored."""
        return self._exit.result().lines

    def close(self) -> None:
        """End the supervisor. The process must have ended."""
        self._supervisor.kill()

    def _record_end(self, answer: asyncio.Future[Any]) -> None:
        """Record how the process has ended. ``answer`` is the completed call of the supervisor's method
        ``wait_until_ended``; if the call has failed, the process counts as lost."""
        if self._exit.done() or answer.cancelled():
            return
        error = answer.exception()
        ended = _make_lost_exit(str(error)) if error is not None else msgspec.json.decode(answer.result(), type=FarExit)
        self._exit.set_result(ended)


def _make_lost_exit(words: str) -> FarExit:
    """Return the exit of a lost process, which its machine cannot report: it counts as killed, for the reason
    ``words``."""
    return FarExit(code=-signal.SIGKILL, words=words, lines=[])
