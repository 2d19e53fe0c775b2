"""The mathematics of training: advantages, losses, corrections and reductions, as pure functions.

:func:`loss`, :func:`advantage`, :func:`kl` and :func:`gae` are for notebooks and checks. A run uses the same formulas
through :class:`~headrace.algo.config.AlgoConfig` and :class:`~headrace.algo.objective.Objective`.
"""

from headrace.algo.config import AlgoConfig
from headrace.algo.notebook import advantage, kl, loss
from headrace.algo.returns import gae

__all__ = ["AlgoConfig", "advantage", "gae", "kl", "loss"]
