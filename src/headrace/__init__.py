"""Headrace post-trains language models with reinforcement learning: generation never stops, training never waits.

import headrace
summary = headrace.train("run.toml")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.control.summary import Summary
    from headrace.errors import HeadraceError
    from headrace.policy import Policy
    from headrace.session import Evaluation, RunConfig, evaluate, load_config, train

__version__ = "0.1.0"

_HOMES = {
    "Evaluation": "headrace.session",
    "HeadraceError": "headrace.errors",
    "Policy": "headrace.policy",
    "RunConfig": "headrace.session",
    "Summary": "headrace.control.summary",
    "evaluate": "headrace.session",
    "load_config": "headrace.session",
    "train": "headrace.session",
}
"""Public names and the modules they come from: imported when they are first asked for."""

__all__ = ["Evaluation", "HeadraceError", "Policy", "RunConfig", "Summary", "evaluate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
