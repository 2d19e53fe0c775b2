"""Sandboxes for agents: sessions with files and a shell, their snapshots and forks, and the drivers that make them.

:mod:`headrace.wings.sandboxes.base` is the contract. A package offers a driver as an entry point of the group
``headrace.sandboxes``: an ``async`` function of the paths that sessions can read.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.base.plugins import Registry
from headrace.wings.sandboxes.base import (
    LIMITS,
    SandboxDriver,
    SandboxSession,
    SandboxSnapshot,
    SandboxSpec,
    SessionEnded,
    SessionState,
)

OpenDriver = Callable[[Sequence[str]], Awaitable[SandboxDriver]]
"""Open a driver whose sessions can read these paths of the machine, besides its system and this Python."""


def _problem(made: Any) -> str | None:
    """Return why an object of an installed package does not open a driver; ``None`` if it does."""
    return None if inspect.iscoroutinefunction(made) else "is no async function that opens a driver"


SANDBOXES = Registry[OpenDriver](group="headrace.sandboxes", setting="the sandbox", check=_problem)
"""All kinds of sandboxes by name."""


async def open_sandboxes(kind: str = "jail", readable: Sequence[str] = ()) -> SandboxDriver:
    """Open the driver of this name. Its sessions can read the paths in ``readable``, besides the system and this
    Python.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name, and
    :class:`~headrace.base.errors.EnvError` where it cannot work on this machine.
    """
    return await SANDBOXES.load(kind)(readable)


__all__ = [
    "LIMITS",
    "SANDBOXES",
    "SandboxDriver",
    "SandboxSession",
    "SandboxSnapshot",
    "SandboxSpec",
    "SessionEnded",
    "SessionState",
    "open_sandboxes",
]
