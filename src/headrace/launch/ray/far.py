"""A process that an actor keeps on a node of the cluster, as the run sees it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec

from headrace.launch.ray.cluster import Actor, Broken, Lost, misfortune
from headrace.launch.ray.keeper import Ended

METER_S = 1.0
"""Longest wait for a reading of processor time."""
KILL_S = 30.0
"""How long a cluster may take to say that a process has ended which was to be ended; then it counts as gone."""


class FarProcess:
    """See :class:`~headrace.launch.child.Process`."""

    def __init__(self, actor: Actor, pid: int, node: str, *, kept: bool) -> None:
        self._actor, self._pid, self._node, self._kept = actor, pid, node, kept
        self._end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        actor.call("ended").add_done_callback(self._learn_end)

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
    def told_to_end(self) -> bool:
        return not self._kept

    async def wait(self) -> int:
        await asyncio.wait([self._end])
        return self._end.result().code

    async def kill(self) -> None:
        self._actor.kill()  # the pipe that it holds is closed by that, and everything ends
        await asyncio.wait([self._end], timeout=KILL_S)
        if not self._end.done():
            self._end.set_result(_gone("was ended, and the cluster does not say that it is gone"))

    async def computed_s(self) -> float:
        try:
            return float(await self._actor.ask("computed_s", timeout_s=METER_S))
        except (Lost, Broken, TimeoutError):
            return 0.0

    def ending(self) -> str:
        return self._end.result().words

    def last_lines(self, log: Path) -> list[str]:
        return self._end.result().lines

    def close(self) -> None:
        self._actor.kill()

    def _learn_end(self, answer: asyncio.Future[Any]) -> None:
        if self._end.done():
            return
        error = answer.exception()
        if error is not None:
            self._end.set_result(_gone(str(misfortune(error))))
        else:
            self._end.set_result(msgspec.json.decode(answer.result(), type=Ended))


def _gone(words: str) -> Ended:
    return Ended(code=-signal.SIGKILL, words=words, lines=[])
