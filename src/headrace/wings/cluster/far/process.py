"""A process on another machine, as the run sees it through its supervisor."""

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
    """A supervisor has ended or cannot be reached. The text gives the reason."""


class SupervisorUnusable(Exception):
    """A supervisor cannot be made on its machine, and trying again would not help. The text gives the reason."""


class SupervisorHandle(Protocol):
    """A handle of a :class:`~headrace.wings.cluster.far.supervisor.ProcessSupervisor` on another machine."""

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
    """Return the result of ``answer``. Raises :class:`SupervisorLost`, :class:`SupervisorUnusable`, or ``TimeoutError``
    after ``timeout_s``."""
    await asyncio.wait([answer], timeout=timeout_s)
    if not answer.done():
        raise TimeoutError
    return answer.result()


class FarProcess:
    """A process on another machine; see :class:`~headrace.launch.child.Process`."""

    def __init__(self, supervisor: SupervisorHandle, pid: int, node: str, *, kept: bool) -> None:
        self._supervisor, self._pid, self._node, self._kept = supervisor, pid, node, kept
        self._end: asyncio.Future[FarExit] = asyncio.get_running_loop().create_future()
        supervisor.call("ended").add_done_callback(self._learn_end)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def node(self) -> str:
        return self._node

    @property
    def working_pid(self) -> int:
        return self._pid

    @property
    def returncode(self) -> int | None:
        return self._end.result().code if self._end.done() else None

    @property
    def accepts_shutdown(self) -> bool:
        return not self._kept

    async def wait(self) -> int:
        await asyncio.wait([self._end])
        return self._end.result().code

    async def kill(self) -> None:
        """Kill the process by ending its supervisor, and wait up to :data:`KILL_S` seconds until its machine says that
        it is gone."""
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
        """Return why the process makes no progress, in the words of its machine; an empty string if that is unknown."""
        try:
            words: bytes = await in_time(self._supervisor.call("halted"), METER_S)
        except (SupervisorLost, SupervisorUnusable, TimeoutError):
            return ""
        return words[:MAX_REASON_BYTES].decode("utf-8", "replace")

    def ending(self) -> str:
        return self._end.result().words

    def last_lines(self, log: Path) -> list[str]:
        return self._end.result().lines

    def close(self) -> None:
        self._supervisor.kill()

    def _learn_end(self, answer: asyncio.Future[Any]) -> None:
        """Note how the process ended, from the answer of its supervisor or from the error in its place."""
        if self._end.done() or answer.cancelled():
            return
        error = answer.exception()
        ended = _gone(str(error)) if error is not None else msgspec.json.decode(answer.result(), type=FarExit)
        self._end.set_result(ended)


def _gone(words: str) -> FarExit:
    return FarExit(code=-signal.SIGKILL, words=words, lines=[])
