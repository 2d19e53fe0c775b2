"""Headrace post-trains language models with reinforcement learning: generation never stops, training never waits.

import headrace
summary = headrace.train("run.toml")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.control.summary import Summary
    from headrace.env.interface import Env, StepResult
    from headrace.env.policy import Episode
    from headrace.errors import HeadraceError
    from headrace.policy import Policy
    from headrace.scoring import sandbox
    from headrace.session import Evaluation, Measures, RunConfig, evaluate, load_config, train

__version__ = "0.1.0"

_HOMES = {
    "Env": "headrace.env.interface",
    "Episode": "headrace.env.policy",
    "Evaluation": "headrace.session",
    "HeadraceError": "headrace.errors",
    "Measures": "headrace.session",
    "Policy": "headrace.policy",
    "RunConfig": "headrace.session",
    "StepResult": "headrace.env.interface",
    "Summary": "headrace.control.summary",
    "evaluate": "headrace.session",
    "load_config": "headrace.session",
    "sandbox": "headrace.scoring",
    "train": "headrace.session",
}
"""Public names and the modules they come from: imported when they are first asked for."""

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
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
