"""A loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.extend import LossSection


class Huber(LossSection):
    """−A·log r near r = 1, levelling off where \\|log r\\| is above ``delta``."""

    kind: Literal["huber"] = "huber"
    """Selects this loss."""
    delta: float = Field(default=0.5, gt=0)
    """Where it begins to level off."""

    def columns(self):
        """It reads log π_old."""
        return frozenset({"log_old"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        bounded_N = self.delta * (inputs.log_ratio_N() / self.delta).tanh()
        return TokenLoss(tokens_N=-bounded_N * inputs.advantages_N)
