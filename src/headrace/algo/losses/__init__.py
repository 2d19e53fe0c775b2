"""Losses. A new one is a class and a row of ``AnyLoss``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.losses.clipped import Aspo, Dapo, DrGrpo, Grpo, Luspo
from headrace.algo.losses.custom import Custom
from headrace.algo.losses.selective import ClipCov, KlCov, M2po
from headrace.algo.losses.sequences import Gmpo, Gspo, GspoToken
from headrace.algo.losses.supervised import Ce, Distill, Dpo, RefKl
from headrace.algo.losses.weighted import Cispo, Dppo, Dro, Ipo, Kimi, Reinforce, Sapo, Topr, Vespo

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
LossConfig = Annotated[AnyLoss, Field(discriminator="kind")]

__all__ = ["AnyLoss", "Custom", "Dapo", "Grpo", "LossConfig"]
