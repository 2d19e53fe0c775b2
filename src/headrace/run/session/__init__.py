"""The front door: run files, run directories, and the verbs train and evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig, load_config
    from headrace.run.session.evaluating import Evaluation, Measures, evaluate
    from headrace.run.session.training import train

_HOMES = {
    "Evaluation": "evaluating",
    "Measures": "evaluating",
    "RunConfig": "config",
    "evaluate": "evaluating",
    "load_config": "config",
    "train": "training",
}
"""Names and the modules they come from, imported when first used: a verb that reads a run directory trains nothing."""

__all__ = ["Evaluation", "Measures", "RunConfig", "evaluate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.run.session' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"headrace.run.session.{_HOMES[name]}"), name)
