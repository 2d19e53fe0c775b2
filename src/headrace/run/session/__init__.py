"""Sessions: the functions :func:`train` and :func:`evaluate`, with the run files and run directories that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig, load_config
    from headrace.run.session.evaluating import Evaluation, Measures, evaluate
    from headrace.run.session.training import train

_MODULES = {
    "Evaluation": "evaluating",
    "Measures": "evaluating",
    "RunConfig": "config",
    "evaluate": "evaluating",
    "load_config": "config",
    "train": "training",
}
"""The module of each public name. A module is imported when one of its names is first used, so that a verb that only
reads a run directory does not import torch."""

__all__ = ["Evaluation", "Measures", "RunConfig", "evaluate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    """Return the public object ``name`` of this package, imported now from its module. Python calls this function for
    an attribute that the package does not have yet. Raises ``AttributeError`` for a name that is not public."""
    if name not in _MODULES:
        raise AttributeError(f"module 'headrace.run.session' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"headrace.run.session.{_MODULES[name]}"), name)
