"""Sessions: the functions :func:`train` and :func:`evaluate`, with the run files and run directories that they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.base.plugins import lazy_attributes

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig, load_config
    from headrace.run.session.evaluating import Evaluation, Measures, evaluate
    from headrace.run.session.training import train

__all__ = ["Evaluation", "Measures", "RunConfig", "evaluate", "load_config", "train"]

# a module is imported when one of its names is first used, so that a verb that only reads a run directory does not
# import torch
__getattr__ = lazy_attributes(
    __name__,
    {
        "Evaluation": ".evaluating",
        "Measures": ".evaluating",
        "RunConfig": ".config",
        "evaluate": ".evaluating",
        "load_config": ".config",
        "train": ".training",
    },
)
