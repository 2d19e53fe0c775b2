"""Losses. A new one is a file here and a row of ``AnyLoss``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.losses.dapo import Dapo
from headrace.algo.losses.grpo import Grpo

AnyLoss = Grpo | Dapo
LossConfig = Annotated[AnyLoss, Field(discriminator="kind")]

__all__ = ["AnyLoss", "Dapo", "Grpo", "LossConfig"]
