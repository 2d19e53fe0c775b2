"""Headrace post-trains language models with reinforcement learning: generation never stops, training never waits.

import headrace
summary = headrace.train("run.toml")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.base import __version__ as __version__
from headrace.base import former

if TYPE_CHECKING:
    from headrace.base.errors import HeadraceError
    from headrace.control.metrics.summary import Summary
    from headrace.policy import Policy
    from headrace.rollout.environments.interface import Env, StepResult
    from headrace.rollout.environments.policy import Episode
    from headrace.rollout.scoring import sandbox
    from headrace.run.session import Evaluation, Measures, RunConfig, evaluate, load_config, train

former.install()

_HOMES = {
    "Env": "headrace.rollout.environments.interface",
    "Episode": "headrace.rollout.environments.policy",
    "Evaluation": "headrace.run.session",
    "HeadraceError": "headrace.base.errors",
    "Measures": "headrace.run.session",
    "Policy": "headrace.policy",
    "RunConfig": "headrace.run.session",
    "StepResult": "headrace.rollout.environments.interface",
    "Summary": "headrace.control.metrics.summary",
    "evaluate": "headrace.run.session",
    "load_config": "headrace.run.session",
    "sandbox": "headrace.rollout.scoring",
    "train": "headrace.run.session",
}
"""Every public name, with the module that declares it. A module is imported at the first use of one of its names."""

__all__ = [
    "Env",
    "Episode",
    "Evaluation",
    "HeadraceError",
    "Measures",
    "Policy",
    "RunConfig",
    "StepResult",
    "Summary",
    "evaluate",
    "load_config",
    "sandbox",
    "train",
]


def __getattr__(name: str) -> Any:
    """Return the public object ``name`` of the package, imported now from its module, so that ``import headrace`` stays
    fast. Python calls this function for an attribute that the package does not have yet. Raises ``AttributeError`` for
    a name that is not public."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
