"""Bridges: environments and tools that were written for other libraries, each in one file.

run file: env.kind = "bridge", env.entry = "LIBRARY/WHAT", env.options = {...}
  ─▶ at load: is there such a bridge, and is its library installed?          nothing of it is imported
  ─▶ in an environment worker: make(WHAT, options) ─▶ a headrace.Env for every episode, or a rollout function
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headrace.base.config.user_code import find_in_file
from headrace.base.errors import ConfigError, EnvError, HeadraceError, nearest
from headrace.rollout.environments.entry import Rollout, as_rollout
from headrace.wings.bridges.base import BRIDGES, Bridge, Make

__all__ = ["BRIDGES", "Bridge", "find_bridge", "load_bridge"]


def find_bridge(entry: str) -> tuple[Bridge, str]:
    """The bridge that ``LIBRARY/WHAT`` names, and what of its library. Nothing of it is imported.

    Raises :class:`~headrace.base.errors.ConfigError` where there is none, or the library is not installed.
    """
    name, _, what = entry.partition("/")
    bridge = BRIDGES.get(name)
    if bridge is None:
        raise ConfigError(f"env.entry={entry!r}: there is no bridge to {name!r}", remedy=nearest(name, BRIDGES))
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
    """Import what ``entry`` names, in the worker that runs it; :class:`~headrace.base.errors.EnvError` for what its
    library
    refuses."""
    bridge, what = find_bridge(entry)
    make: Make = import_module(f"headrace.wings.bridges.{bridge.name}").make
    try:
        return as_rollout(make(what, dict(options)), executor)
    except HeadraceError:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary of a foreign library: its refusal is told in words
        words = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        raise EnvError(
            f"env.entry={entry!r} with env.options={dict(options)!r}: {words}",
            remedy=f"mend them: the options are those of {bridge.name} and of its bridge (docs/bridges.md)",
        ) from None
