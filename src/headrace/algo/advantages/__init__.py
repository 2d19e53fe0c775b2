"""The formulas that compute advantages from rewards, with NumPy only. A new advantage is a class and a row of
``AnyAdvantage``."""

from __future__ import annotations

from typing import Annotated

from headrace.algo.advantages.base import Advantage, AdvantageSection
from headrace.algo.advantages.groups import (
    Gdpo,
    GrpoAdvantage,
    Maxrl,
    Opo,
    OptimalBaseline,
    Rae,
    ReinforcePp,
    Remax,
    Rloo,
)
from headrace.algo.advantages.outcomes import Outcomes, make_outcomes
from headrace.algo.advantages.tokens import GaeAdvantage, Prpo, ReverseKl, StepAdvantage
from headrace.base.config.kinds import Kinds

AnyAdvantage = (
    GrpoAdvantage
    | Rloo
    | Maxrl
    | Gdpo
    | ReinforcePp
    | Opo
    | Remax
    | Rae
    | StepAdvantage
    | OptimalBaseline
    | Prpo
    | ReverseKl
    | GaeAdvantage
)
ADVANTAGES = Kinds(AnyAdvantage, group="headrace.advantages", setting="algo.advantage", contract=AdvantageSection)
"""The registry of advantages, including those of installed packages."""
AdvantageConfig = Annotated[AnyAdvantage, ADVANTAGES]

__all__ = ["Advantage", "AdvantageConfig", "AnyAdvantage", "GaeAdvantage", "GrpoAdvantage", "Outcomes", "make_outcomes"]
