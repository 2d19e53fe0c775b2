"""Advantages: rewards become credit. NumPy only. A new one is a file here and a row of ``AnyAdvantage``."""

from __future__ import annotations

from headrace.algo.advantages.base import Advantage, Scores, scores_of
from headrace.algo.advantages.grpo import GrpoAdvantage

AnyAdvantage = GrpoAdvantage
AdvantageConfig = AnyAdvantage

__all__ = ["Advantage", "AdvantageConfig", "AnyAdvantage", "GrpoAdvantage", "Scores", "scores_of"]
