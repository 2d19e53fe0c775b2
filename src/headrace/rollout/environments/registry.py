"""The registry of environments that installed packages provide, by the names of ``env.kind``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headrace.base.config import Section
from headrace.base.plugins import Registry
from headrace.rollout.environments.interface import Env

BUILT_IN = ("single_turn", "env", "rollout", "program", "bridge")
"""The kinds of environments that Headrace contains. All but the first run the code that ``env.entry`` or
``env.command`` names."""


def _describe_problem(made: Any) -> str | None:
    """Return why an object of an installed package is not an environment; ``None`` if it is an environment."""
    if isinstance(made, type) and issubclass(made, Env):
        return None
    if inspect.iscoroutinefunction(made) and len(inspect.signature(made).parameters) >= 2:
        return None
    return "is neither a class that inherits headrace.Env nor an async function of (task, policy)"


ENVIRONMENTS = Registry[Callable[..., Any]](group="headrace.environments", setting="env.kind", check=_describe_problem)
"""Classes and functions of installed packages, of the same kinds that ``env.entry`` may name. They are called with
``env.options`` as arguments."""


def _describe_section_problem(made: Any) -> str | None:
    """Return why an object of an installed package does not describe options; ``None`` if it does."""
    return None if isinstance(made, type) and issubclass(made, Section) else "inherits no headrace.base.config.Section"


ENV_OPTIONS = Registry[type[Section]](group="headrace.env_options", setting="env.kind", check=_describe_section_problem)
"""For environments of installed packages: the section of settings that describes the options, by the environment's
name. If an environment has such a section, ``env.options`` are validated against it when the run file is read."""
