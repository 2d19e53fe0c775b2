"""Advantages: rewards become credit. NumPy only. A new one is a class and a row of ``AnyAdvantage``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.advantages.base import Advantage
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
from headrace.algo.advantages.outcomes import Outcomes, outcomes_of
from headrace.algo.advantages.tokens import GaeAdvantage, Prpo, ReverseKl, StepAdvantage

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
AdvantageConfig = Annotated[AnyAdvantage, Field(discriminator="kind")]

__all__ = ["Advantage", "AdvantageConfig", "AnyAdvantage", "GaeAdvantage", "GrpoAdvantage", "Outcomes", "outcomes_of"]
