"""A staleness bound that follows what staleness costs: ``flow.max_age = "auto"``.

Every step says how far the policy that is trained has drifted from the one that sampled: the effective sample size of
π/μ as a fraction, and KL(μ‖π) of the tokens that are not fresh, beyond that of fresh ones. A bad step lowers the bound
by one at once; so many good ones in a row that reached the bound raise it by one. After every change as many steps as
the bound has versions are not judged: their tokens were sampled under the bound before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError


class AgeTuning(Section):
    """What moves a bound that tunes itself."""

    start: int = Field(default=1, ge=1)
    """The bound that the run begins with."""
    limit: int = Field(default=4, ge=1)
    """The bound is never raised above this."""
    min_ess: float = Field(default=0.9, gt=0, le=1)
    """A step whose effective sample size is a smaller fraction of its tokens is bad."""
    max_kl: float = Field(default=5e-3, gt=0)
    """A step whose stale tokens show a larger KL(μ‖π) beyond that of fresh ones is bad; one with less than half of it
    is good."""
    patience: int = Field(default=8, ge=1)
    """Good steps in a row that raise the bound."""

    @model_validator(mode="after")
    def _start_is_allowed(self) -> AgeTuning:
        if self.start > self.limit:
            raise ConfigError(
                f"flow.age_tuning.start={self.start} is more than flow.age_tuning.limit={self.limit}",
                remedy=f"set flow.age_tuning.start <= {self.limit}",
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeTuner:
    """Where the tuning stands: data, and one transition."""

    settings: AgeTuning
    max_age: int
    """The bound that holds now."""
    good: int = 0
    """Good steps in a row that reached the bound."""
    unjudged: int = 0
    """Steps whose tokens were sampled under an earlier bound."""

    def after_step(self, metrics: Mapping[str, float | None], oldest_age: int) -> tuple[AgeTuner, str]:
        """The tuning after a step with these ``metrics`` that trained tokens up to ``oldest_age``, and what it did and
        why; empty words where the bound stays.

        >>> tuner = AgeTuner(settings=AgeTuning(), max_age=2)
        >>> tuner, why = tuner.after_step({"ess": 0.5, "stale_k3": 0.001}, oldest_age=2)
        >>> tuner.max_age, why
        (1, 'max_age 2 → 1: effective sample size 0.5 < 0.9')
        """
        if self.unjudged:
            return replace(self, unjudged=self.unjudged - 1), ""
        ess, kl = _number(metrics, "ess"), _number(metrics, "staleness_k3", "stale_k3")
        if oldest_age == 0 or (ess is None and kl is None):
            return self, ""  # it says nothing about staleness
        ess, kl = 1.0 if ess is None else ess, 0.0 if kl is None else kl
        if ess < self.settings.min_ess:
            return self._moved(-1, f"effective sample size {ess:.3g} < {self.settings.min_ess:g}")
        if kl > self.settings.max_kl:
            return self._moved(-1, f"KL of stale tokens {kl:.2g} > {self.settings.max_kl:g}")
        good = kl < self.settings.max_kl / 2 and oldest_age >= self.max_age
        tuner = replace(self, good=self.good + 1 if good else 0)
        if tuner.good < self.settings.patience:
            return tuner, ""
        why = f"{tuner.good} good steps in a row reached it; the last: effective sample size {ess:.3g}, KL {kl:.2g}"
        return tuner._moved(1, why)

    def _moved(self, by: int, why: str) -> tuple[AgeTuner, str]:
        new = min(self.settings.limit, max(1, self.max_age + by))
        if new == self.max_age:
            return replace(self, good=0), ""
        words = f"max_age {self.max_age} → {new}: {why}"
        return replace(self, max_age=new, good=0, unjudged=max(new, self.max_age)), words


def _number(metrics: Mapping[str, float | None], *names: str) -> float | None:
    """The first of the metrics that is there."""
    return next((value for name in names if (value := metrics.get(name)) is not None), None)
