"""Advantages: rewards become credit. NumPy only. A new one is a file here and a row of ``AnyAdvantage``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.advantages.base import Advantage
from headrace.algo.advantages.gae import GaeAdvantage
from headrace.algo.advantages.gdpo import Gdpo
from headrace.algo.advantages.grpo import GrpoAdvantage
from headrace.algo.advantages.maxrl import Maxrl
from headrace.algo.advantages.opo import Opo
from headrace.algo.advantages.optimal_baseline import OptimalBaseline
from headrace.algo.advantages.outcomes import Outcomes, outcomes_of
from headrace.algo.advantages.prpo import Prpo
from headrace.algo.advantages.rae import Rae
from headrace.algo.advantages.reinforce_pp import ReinforcePp
from headrace.algo.advantages.remax import Remax
from headrace.algo.advantages.reverse_kl import ReverseKl
from headrace.algo.advantages.rloo import Rloo
from headrace.algo.advantages.step import Step

AnyAdvantage = (
    GrpoAdvantage | Rloo | Maxrl | Gdpo | ReinforcePp | Opo | Remax | Rae | Step | OptimalBaseline | Prpo | ReverseKl
    | GaeAdvantage
)  # fmt: skip
AdvantageConfig = Annotated[AnyAdvantage, Field(discriminator="kind")]

__all__ = ["Advantage", "AdvantageConfig", "AnyAdvantage", "GaeAdvantage", "GrpoAdvantage", "Outcomes", "outcomes_of"]
