"""Distributions of the random quantities of a workload, such as the tokens of an answer, the turns of an episode or the
seconds of a reward. They are settings of a cluster file.

Shape legend: N draws.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError

Draws = npt.NDArray[np.float64]


class Spread(Section):
    """A distribution of non-negative numbers. All randomness comes from the generator passed to :meth:`draw`."""

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return ``count`` draws with the generator ``rng``, shape [N]."""
        raise NotImplementedError


class ConstantSpread(Spread):
    """A distribution with a single value."""

    kind: Literal["constant"] = "constant"
    value: NonNegativeFloat

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return the value ``count`` times, shape [N]; ``rng`` is not used."""
        return np.full(count, self.value)


class Uniform(Spread):
    """A uniform distribution between ``low`` and ``high``."""

    kind: Literal["uniform"] = "uniform"
    low: NonNegativeFloat = 1.0
    high: PositiveFloat

    @model_validator(mode="after")
    def _refuse_empty_range(self) -> Self:
        """Refuse a range whose lower end is above its upper end."""
        if self.low > self.high:
            raise ConfigError(
                f"a uniform spread from low={self.low:g} to high={self.high:g} has no values",
                remedy=f"set low <= {self.high:g} or high >= {self.low:g}",
            )
        return self

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return ``count`` draws between ``low`` and ``high`` with the generator ``rng``, shape [N]."""
        return rng.uniform(self.low, self.high, count)


class Lognormal(Spread):
    """A lognormal distribution, typical of the answers of reasoning models: most are short, some are long.

    >>> drawn = Lognormal(mean=100, cv=1.0).draw(np.random.default_rng(0), 100_000)
    >>> round(float(drawn.mean()), -1), round(float(drawn.std() / drawn.mean()), 1)
    (100.0, 1.0)
    """

    kind: Literal["lognormal"] = "lognormal"
    mean: PositiveFloat
    """Mean before the cap is applied."""
    cv: NonNegativeFloat = 1.0
    """Coefficient of variation: standard deviation divided by mean."""
    cap: PositiveFloat | None = None
    """Upper limit to which greater draws are reduced; unset: no limit."""

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return ``count`` draws with the generator ``rng``, shape [N], each at most ``cap``."""
        # the underlying normal distribution has the variance log(1 + cv²) and the mean log(mean) - variance / 2
        sigma = math.sqrt(math.log1p(self.cv**2))
        return np.minimum(rng.lognormal(math.log(self.mean) - sigma**2 / 2, sigma, count), self.cap or math.inf)


class Pareto(Spread):
    """A heavy-tailed distribution: the probability of a value above x falls as x^−``alpha``. For ``alpha`` <= 2 the
    variance is infinite unless ``cap`` is set."""

    kind: Literal["pareto"] = "pareto"
    mean: PositiveFloat
    """Mean before the cap is applied."""
    alpha: float = Field(default=1.5, gt=1)
    cap: PositiveFloat | None = None
    """Upper limit to which greater draws are reduced; unset: no limit."""

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return ``count`` draws with the generator ``rng``, shape [N], each at most ``cap``."""
        least = self.mean * (self.alpha - 1) / self.alpha
        return np.minimum(least * (1.0 + rng.pareto(self.alpha, count)), self.cap or math.inf)


class RecordedSpread(Spread):
    """The empirical distribution of values that a run recorded."""

    kind: Literal["recorded"] = "recorded"
    values: tuple[NonNegativeFloat, ...] = Field(min_length=1)

    def draw(self, rng: np.random.Generator, count: int) -> Draws:
        """Return ``count`` of the recorded values, each chosen with equal probability by the generator ``rng``, shape
        [N]."""
        return rng.choice(np.asarray(self.values, np.float64), count)


def _as_table(value: Any) -> Any:
    """Return the table of a constant distribution if ``value`` is a number, and any other value unchanged."""
    return {"kind": "constant", "value": value} if type(value) in (int, float) else value


AnySpread = Annotated[
    Annotated[ConstantSpread | Uniform | Lognormal | Pareto | RecordedSpread, Field(discriminator="kind")],
    BeforeValidator(_as_table),
]
"""A distribution as written in a file: a table with its ``kind``, or a number."""
