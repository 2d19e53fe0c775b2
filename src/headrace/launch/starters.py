"""The launcher ``local``, which starts all processes of a run on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from headrace.base.types.observation import Event
from headrace.launch.config import Launcher

if TYPE_CHECKING:
    # not imported at run time, so that a run file can be read without the modules that start processes
    from headrace.launch.child import Starter
    from headrace.launch.order import LaunchOrder


@asynccontextmanager
async def _open_starter(order: LaunchOrder) -> AsyncIterator[Starter]:
    """Yield the starter of processes on this machine, for the run that ``order`` describes. If the order contains a
    fork server, its messages are received within this context, and engines and learners are forked from it."""
    from headrace.launch.local_process import LocalStarter

    if order.forks is None:
        yield LocalStarter()
        return
    with order.forks.listening(lambda text: order.on_event(Event(wall_s=0.0, text=text, level="warning"))):
        yield LocalStarter(order.forks)


async def _accept_all(starter: Starter, names: tuple[str, ...]) -> None:
    """Accept all engines: on this machine only GPUs are counted, which are chosen elsewhere."""


LOCAL = Launcher(starting=_open_starter, refuse_no_room=_accept_all)
"""The launcher for ``launch.kind = "local"``."""
