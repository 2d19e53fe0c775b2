"""The control of the alignment of consecutive gradients, which asynchronous training makes too large.

    c = cos(g, h)     g: the gradient of an update, h: that of the update before, both before clipping and whole

    c ≤ low           g is used as it is
    low < c ≤ high    g = o + a·h, with o orthogonal to h: a is shrunk until the cosine is low, and o is kept,
                      a·|h| = low/√(1 − low²)·|o|
    c > high          the weights are not updated

Batches that were sampled by the same old weights ask for the same step again and again. Each step is right by itself,
but their sum overshoots. Only positive cosines count: a gradient that points against the former one damps, and is used
as it is.

Source: GAC, arXiv 2603.01501, for the observation and for the three regimes (safe, projection, skip). The thresholds,
the shrinking to exactly ``low``, and the choice of the unclipped gradient of the update before, as it was before any
projection, are ours: we do not know theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError


class GradientProducts(NamedTuple):
    """The inner products of a gradient g and of the gradient h of the update before, over the same weights."""

    own: float
    """g·g."""
    cross: float
    """g·h."""
    earlier: float
    """h·h; 0 if there is no update before."""

    @property
    def cosine(self) -> float:
        """Return the cosine of the angle between g and h; 0 if one of them is 0."""
        lengths = math.sqrt(self.own) * math.sqrt(self.earlier)
        return max(-1.0, min(1.0, self.cross / lengths)) if lengths > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentDecision:
    """The change of one gradient before its update."""

    added: float = 0.0
    """The factor by which the gradient of the update before is multiplied and then added; 0: the gradient is used as it
    is."""
    skipped: bool = False
    """Whether the weights are not updated."""


class AlignmentConfig(Section):
    """The settings of the control of the alignment of consecutive gradients."""

    low: float = Field(default=0.1, ge=0, lt=1)
    """The largest cosine between the gradients of two consecutive updates. The component of a gradient along the former
    one is shrunk until their cosine is not larger."""
    high: float | None = Field(default=None, gt=0, lt=1)
    """The cosine above which the weights are not updated at all. Unset: every gradient is used."""

    @model_validator(mode="after")
    def _refuse_high_below_low(self) -> AlignmentConfig:
        """Refuse a ``high`` that is not above ``low``: no gradient would be shrunk."""
        if self.high is not None and self.high <= self.low:
            raise ConfigError(
                f"learner.alignment.high={self.high} is not above learner.alignment.low={self.low}: no gradient would "
                "be shrunk, and updates would be skipped that are safe",
                remedy=f"set learner.alignment.high above {self.low}, or leave it out",
            )
        return self

    def decide(self, products: GradientProducts) -> AlignmentDecision:
        """Return the change of the gradient with these inner products.

        >>> config = AlignmentConfig(low=0.6, high=0.9)
        >>> config.decide(GradientProducts(own=1.0, cross=0.5, earlier=1.0))
        AlignmentDecision(added=0.0, skipped=False)
        >>> round(config.decide(GradientProducts(own=1.0, cross=0.8, earlier=1.0)).added, 9)  # |o| = 0.6, a: 0.8 → 0.45
        -0.35
        >>> config.decide(GradientProducts(own=1.0, cross=0.95, earlier=1.0)).skipped
        True
        """
        cosine = products.cosine
        if self.high is not None and cosine > self.high:
            return AlignmentDecision(skipped=True)
        if cosine <= self.low:
            return AlignmentDecision()
        length = math.sqrt(products.earlier)
        along = products.cross / length
        orthogonal = math.sqrt(max(0.0, products.own - along * along))
        wanted = self.low / math.sqrt(1 - self.low * self.low) * orthogonal
        return AlignmentDecision(added=(wanted - along) / length)
