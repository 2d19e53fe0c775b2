"""Sandboxes for agents: sessions with files and a shell, their snapshots and forks, and the drivers that start them.

:mod:`headrace.wings.sandboxes.base` contains the contract. A package registers a driver as an entry point of the group
``headrace.sandboxes``: an ``async`` function whose first argument is the list of paths that sessions can read, and
whose keyword arguments are the driver's settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.plugins import Registry
from headrace.wings.sandboxes.base import (
    LIMITS,
    DriverLost,
    SandboxDriver,
    SandboxSession,
    SandboxSnapshot,
    SandboxSpec,
    SessionEnded,
)

OpenDriver = Callable[..., Awaitable[SandboxDriver]]
"""The type of a function that opens a driver. Its first argument is the list of paths that sessions can read; its
keyword arguments are settings."""


def _problem(made: Any) -> str | None:
    """Return the reason why ``made``, an object of an installed package, cannot open a driver; ``None`` if it can."""
    return None if inspect.iscoroutinefunction(made) else "is no async function that opens a driver"


SANDBOXES = Registry[OpenDriver](group="headrace.sandboxes", setting="the sandbox", check=_problem)
"""The registry of all kinds of sandboxes."""


async def open_sandboxes(
    kind: str = "jail", readable: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> SandboxDriver:
    """Open and return the driver of ``kind`` with the settings ``options``. Its sessions can read the paths
    ``readable``, in addition to this machine's system and Python, or to the image.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name or setting, and
    :class:`~headrace.base.errors.EnvError` if the driver cannot work on this machine.
    """
    open_driver, settings = SANDBOXES.load(kind), dict(options or {})
    try:
        inspect.signature(open_driver).bind(readable, **settings)
    except TypeError as error:
        raise ConfigError(
            f"sandboxes of kind {kind!r} do not take the settings {sorted(settings)}: {error}",
            remedy="see docs/sandboxes.md for the settings of each kind",
        ) from None
    return await open_driver(readable, **settings)


__all__ = [
    "LIMITS",
    "SANDBOXES",
    "DriverLost",
    "SandboxDriver",
    "SandboxSession",
    "SandboxSnapshot",
    "SandboxSpec",
    "SessionEnded",
    "open_sandboxes",
]
