"""The mathematics: pure functions, one file per formula.

:func:`loss`, :func:`advantage`, :func:`kl` and :func:`gae` are for notebooks and checks; a run uses
:class:`~headrace.algo.config.AlgoConfig` and :class:`~headrace.algo.objective.Objective`, which is the same code.
"""

from headrace.algo.config import AlgoConfig
from headrace.algo.notebook import advantage, kl, loss
from headrace.algo.returns import gae

__all__ = ["AlgoConfig", "advantage", "gae", "kl", "loss"]
