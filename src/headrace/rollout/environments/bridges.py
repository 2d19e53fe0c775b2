"""Bridges to environments and tools of other libraries. Each bridge is one file, registered by an entry point.

run file: env.kind = "bridge", env.entry = "LIBRARY/WHAT", env.options = {...}
  ─▶ at load: is there such a bridge, and is its library installed?          the library is not imported
  ─▶ in an environment worker: make(WHAT, options) ─▶ a headrace.Env for every episode, or a rollout function
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from headrace.base.config.user_code import find_in_file
from headrace.base.errors import ConfigError, EnvError, HeadraceError, nearest
from headrace.base.plugins import Registry
from headrace.rollout.environments.entry import Rollout, as_rollout, load_entry
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import EpisodePolicy
from headrace.rollout.environments.registry import BUILT_IN, ENVIRONMENTS

BridgedEnvironment = Callable[[], Env] | Callable[[Mapping[str, Any], EpisodePolicy], Awaitable[Any]]
"""What a bridge returns: a constructor of an environment, called for every episode, or an ``async def rollout(task,
policy)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """The description of a bridge and its library. It can be read without importing the library. The bridge has the
    name of its entry point."""

    make: Callable[[str, dict[str, Any]], BridgedEnvironment]
    """The function ``make(what, options)`` that imports the library and returns the environment. ``what`` is the part
    of ``env.entry`` after the slash, and ``options`` is ``env.options``."""
    example: str
    """An example of ``env.entry``, for error messages."""
    package: str = ""
    """The import name of the package that must be installed; empty if none is needed."""
    install: str = ""
    """The arguments of ``pip install`` that install the package."""
    names_file: bool = False
    """Whether the part of ``env.entry`` after the slash is a ``file.py:name`` of the user."""


BRIDGES = Registry[Bridge](
    group="headrace.bridges",
    setting="the bridge",
    check=lambda made: None if isinstance(made, Bridge) else f"is a {type(made).__name__}, and not a Bridge",
)
"""All bridges by name. Atropos is not among them, because its environments control the run and are served by a separate
program."""


def load_environment(
    kind: str, entry: str, options: Mapping[str, Any], executor: Executor, *, own_namespace: bool = True
) -> Rollout:
    """Import the environment that ``env.kind``, ``env.entry`` and ``env.options`` name, and return a function that
    attempts a row. This is called in the worker that runs the environment. Plain functions of the environment run in
    ``executor``. ``own_namespace`` (``env.own_namespace``) applies to programs.

    Raises :class:`~headrace.base.errors.EnvError` or :class:`~headrace.base.errors.ConfigError` if the environment
    cannot be used.
    """
    if kind == "bridge":
        return load_bridge(entry, options, executor)
    if kind in ENVIRONMENTS and kind not in BUILT_IN:
        return as_rollout(partial(ENVIRONMENTS.load(kind), **options), executor)
    return load_entry(kind, entry, executor, own_namespace=own_namespace)


def find_bridge(entry: str) -> tuple[Bridge, str]:
    """Return the bridge that ``entry``, of the form ``LIBRARY/WHAT``, names, and the part after the slash. The library
    is not imported.

    Raises :class:`~headrace.base.errors.ConfigError` if there is no such bridge or its library is not installed.
    """
    name, _, what = entry.partition("/")
    if name not in BRIDGES:
        raise ConfigError(f"env.entry={entry!r}: there is no bridge to {name!r}", remedy=nearest(name, BRIDGES))
    bridge = BRIDGES.load(name)
    if not what:
        raise ConfigError(
            f"env.entry={entry!r} does not say what of {name} it is", remedy=f"write env.entry = {bridge.example!r}"
        )
    if bridge.package and find_spec(bridge.package) is None:
        raise ConfigError(
            f"env.entry={entry!r} needs the package {bridge.package}, which is not installed",
            remedy=f"pip install {bridge.install}",
        )
    if bridge.names_file:
        find_in_file(what, "env.entry")
    return bridge, what


def load_bridge(entry: str, options: Mapping[str, Any], executor: Executor) -> Rollout:
    """Import the environment that ``entry`` names, create it with ``options``, and return a function that attempts a
    row. This is called in the worker that runs the environment. Plain functions of the environment run in ``executor``.

    Raises :class:`~headrace.base.errors.EnvError` if its library refuses the entry or the options.
    """
    bridge, what = find_bridge(entry)
    try:
        return as_rollout(bridge.make(what, dict(options)), executor)
    except HeadraceError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary of a foreign library: its refusal becomes an error message
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        name = entry.partition("/")[0]
        raise EnvError(
            f"env.entry={entry!r} with env.options={dict(options)!r}: {text}",
            remedy=f"fix them: the options are those of {name} and of its bridge (docs/bridges.md)",
        ) from None
