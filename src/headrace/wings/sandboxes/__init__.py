"""Sandboxes for agents: sessions with files and a shell, their snapshots and forks, and the drivers that make them.

:mod:`headrace.wings.sandboxes.base` is the contract. A package offers a driver as an entry point of the group
``headrace.sandboxes``: an ``async`` function of the paths that sessions can read, with settings of its own by name.
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
    SessionState,
)

OpenDriver = Callable[..., Awaitable[SandboxDriver]]
"""Open a driver whose sessions can read these paths of the machine, the first argument; settings come by name."""


def _problem(made: Any) -> str | None:
    """Return why an object of an installed package does not open a driver; ``None`` if it does."""
    return None if inspect.iscoroutinefunction(made) else "is no async function that opens a driver"


SANDBOXES = Registry[OpenDriver](group="headrace.sandboxes", setting="the sandbox", check=_problem)
"""All kinds of sandboxes by name."""


async def open_sandboxes(
    kind: str = "jail", readable: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> SandboxDriver:
    """Open the driver of this name, with its settings by name as ``options``. Its sessions can read the paths in
    ``readable``, besides the system and this Python, or the image.

    Raises :class:`~headrace.base.errors.ConfigError` for an unknown name or setting, and
    :class:`~headrace.base.errors.EnvError` where it cannot work on this machine.
    """
    open_driver, given = SANDBOXES.load(kind), dict(options or {})
    try:
        inspect.signature(open_driver).bind(readable, **given)
    except TypeError as error:
        raise ConfigError(
            f"sandboxes of kind {kind!r} do not take the settings {sorted(given)}: {error}",
            remedy="see docs/sandboxes.md for the settings of each kind",
        ) from None
    return await open_driver(readable, **given)


__all__ = [
    "LIMITS",
    "SANDBOXES",
    "DriverLost",
    "SandboxDriver",
    "SandboxSession",
    "SandboxSnapshot",
    "SandboxSpec",
    "SessionEnded",
    "SessionState",
    "open_sandboxes",
]
