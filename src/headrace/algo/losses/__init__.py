"""The loss formulas. A new loss is a class and a row of ``AnyLoss``."""

from __future__ import annotations

from typing import Annotated

from headrace.algo.losses.clipped import Aspo, Dapo, DrGrpo, Gmpo, Grpo, Gspo, GspoToken, Luspo
from headrace.algo.losses.custom import Custom
from headrace.algo.losses.section import LossSection
from headrace.algo.losses.selective import ClipCov, KlCov, M2po
from headrace.algo.losses.supervised import Ce, Distill, Dpo, RefKl
from headrace.algo.losses.weighted import Cispo, Dppo, Dro, Ipo, Kimi, Reinforce, Sapo, Topr, Vespo
from headrace.base.config.kinds import Kinds

AnyLoss = (
    Grpo
    | Dapo
    | DrGrpo
    | Luspo
    | Gspo
    | GspoToken
    | Gmpo
    | Cispo
    | Sapo
    | Vespo
    | Reinforce
    | Topr
    | Kimi
    | Dro
    | Dppo
    | Ipo
    | M2po
    | ClipCov
    | KlCov
    | Aspo
    | Ce
    | RefKl
    | Dpo
    | Distill
    | Custom
)
LOSSES = Kinds(AnyLoss, group="headrace.losses", setting="algo.loss", contract=LossSection)
"""The registry of losses, including those of installed packages."""
LossConfig = Annotated[AnyLoss, LOSSES]

__all__ = ["AnyLoss", "Custom", "Dapo", "Grpo", "LossConfig"]
