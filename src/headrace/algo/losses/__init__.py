"""Losses. A new one is a file here and a row of ``AnyLoss``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.losses.aspo import Aspo
from headrace.algo.losses.ce import Ce
from headrace.algo.losses.cispo import Cispo
from headrace.algo.losses.clip_cov import ClipCov
from headrace.algo.losses.custom import Custom
from headrace.algo.losses.dapo import Dapo
from headrace.algo.losses.distill import Distill
from headrace.algo.losses.dpo import Dpo
from headrace.algo.losses.dppo import Dppo
from headrace.algo.losses.dr_grpo import DrGrpo
from headrace.algo.losses.dro import Dro
from headrace.algo.losses.gmpo import Gmpo
from headrace.algo.losses.grpo import Grpo
from headrace.algo.losses.gspo import Gspo
from headrace.algo.losses.gspo_token import GspoToken
from headrace.algo.losses.ipo import Ipo
from headrace.algo.losses.kimi import Kimi
from headrace.algo.losses.kl_cov import KlCov
from headrace.algo.losses.luspo import Luspo
from headrace.algo.losses.m2po import M2po
from headrace.algo.losses.ref_kl import RefKl
from headrace.algo.losses.reinforce import Reinforce
from headrace.algo.losses.sapo import Sapo
from headrace.algo.losses.topr import Topr
from headrace.algo.losses.vespo import Vespo

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
