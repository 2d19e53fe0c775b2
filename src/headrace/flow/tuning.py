"""The automatic tuning of two settings during a run: ``flow.capacity = "auto"`` and ``flow.max_age = "auto"``. The
controller calls it after each measurement.

**Capacity**: the number of groups that are generated at once is adapted to the engine's statistics by additive increase
and multiplicative decrease (Chiu and Jain 1989), like the window of a TCP connection: the engine's cache corresponds to
the link, and a preempted sequence to a lost packet.

    sequences were preempted, or the cache is full        cut by a quarter, then wait until the cut has taken effect
    more requests wait than half of those that run        a step down
    the cap is reached, nothing waits, the cache has room a step up; doubled until there was a first sign of pressure
    otherwise                                             no change
    the cache grew, since an engine was added             as before the first sign of pressure

The cap is never lower than one batch, so that a step is always possible, and never higher than the lead allows.

**Age**: the staleness bound is adapted to the measured cost of staleness. Every step reports how far the trained policy
differs from the policy that sampled: the effective sample size of π/μ as a fraction, and KL(μ‖π) of stale tokens minus
KL(μ‖π) of fresh tokens. One bad step lowers the bound by one; ``patience`` good steps in a row, each with a token as
old as the bound, raise it by one. After a change, as many steps as the bound has versions are ignored, because their
tokens were sampled under the earlier bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import Field, model_validator

from headrace.base.config import Section
from headrace.base.errors import ConfigError
from headrace.base.types.messages.controller import EngineStats

FULL = 0.95
"""The cache counts as full if running sequences use a larger fraction of it than this."""
RISE_BELOW = 0.85
"""The cap rises only while running sequences use at most this fraction of the cache."""
CUT = 0.75
"""The factor by which a cut multiplies the cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The state of the tuning of ``flow.capacity``: an immutable record, which :meth:`observe` replaces after new
    statistics of the engine."""

    floor: int
    """The lowest cap: the number of groups of one batch."""
    capacity: int
    """The cap: the largest number of groups that are generated or scored at once."""
    last_stats: EngineStats
    """The engine's statistics at the last call of :meth:`observe`."""
    searching: bool = True
    """Whether there has been no sign of pressure yet. While this is true, a rise doubles the cap."""

    def observe(self, stats: EngineStats, *, num_running: int, limit: int) -> tuple[Concurrency, str]:
        """Return the state after new statistics of the engine, and a sentence that says what changed and why, which is
        empty if the cap stays. ``num_running`` groups are generated or scored now; the lead, which is how far
        generation may run ahead of training, allows at most ``limit`` groups.

        >>> cap = Concurrency(floor=4, capacity=16, last_stats=EngineStats())
        >>> cap, why = cap.observe(EngineStats(preempted=3), num_running=16, limit=32)
        >>> cap.capacity, why
        (12, 'capacity 16 → 12 groups: 3 sequences had to leave the cache')
        """
        limit = max(limit, self.floor)
        grew = stats.cache_blocks > self.last_stats.cache_blocks > 0
        state = replace(self, last_stats=stats, capacity=min(self.capacity, limit), searching=self.searching or grew)
        step = max(1, self.floor // 4)
        in_effect = num_running <= state.capacity
        preempted = stats.preempted - self.last_stats.preempted
        used = stats.cache_blocks_used / stats.cache_blocks if stats.cache_blocks else 0.0
        if preempted > 0 or used > FULL:
            why = f"{preempted} sequences had to leave the cache" if preempted > 0 else f"the cache is {used:.0%} full"
            cut = int(CUT * state.capacity) if in_effect else state.capacity
            return replace(state, searching=False)._set_capacity(cut, limit, why)
        if stats.waiting > stats.running // 2 and stats.running > 0:
            why = f"{stats.waiting} requests wait while {stats.running} run"
            return replace(state, searching=False)._set_capacity(
                state.capacity - step if in_effect else state.capacity, limit, why
            )
        if num_running < state.capacity or stats.waiting or used > RISE_BELOW:
            return state, ""
        why = "all of it is in use and nothing waits" + (f" (cache {used:.0%} used)" if stats.cache_blocks else "")
        return state._set_capacity(2 * state.capacity if state.searching else state.capacity + step, limit, why)

    def _set_capacity(self, capacity: int, limit: int, why: str) -> tuple[Concurrency, str]:
        """Return the state with ``capacity``, limited to the range from one batch to ``limit``, and a sentence that
        says what has changed and ``why``. The sentence is empty if the cap is the same."""
        new = min(limit, max(self.floor, capacity))
        if new == self.capacity:
            return self, ""
        return replace(self, capacity=new), f"capacity {self.capacity} → {new} groups: {why}"


class AgeTuning(Section):
    """The settings of a staleness bound that tunes itself (``flow.max_age = "auto"``)."""

    start: int = Field(default=1, ge=1)
    """The bound at the beginning of the run, in versions."""
    limit: int = Field(default=4, ge=1)
    """The largest value to which the bound is raised, in versions."""
    min_ess: float = Field(default=0.9, gt=0, le=1)
    """A step with an effective sample size below this fraction of its tokens is bad."""
    max_kl: float = Field(default=5e-3, gt=0)
    """A step is bad if KL(μ‖π) of its stale tokens exceeds KL(μ‖π) of its fresh tokens by more than this, and good if
    the excess is less than half of this."""
    patience: int = Field(default=8, ge=1)
    """Number of good steps in a row that raise the bound."""

    @model_validator(mode="after")
    def _refuse_start_above_limit(self) -> AgeTuning:
        """Raise :class:`ConfigError` if ``start`` is above ``limit``."""
        if self.start > self.limit:
            raise ConfigError(
                f"flow.age_tuning.start={self.start} is more than flow.age_tuning.limit={self.limit}",
                remedy=f"set flow.age_tuning.start <= {self.limit}",
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeTuner:
    """The state of the tuning of ``flow.max_age``: an immutable record, which :meth:`after_step` replaces after each
    step."""

    settings: AgeTuning
    """The limits and thresholds of the tuning."""
    max_age: int
    """The staleness bound that holds now, in versions."""
    good: int = 0
    """Number of good steps in a row that reached the bound."""
    ignored_steps: int = 0
    """Number of next steps that are ignored because their tokens were sampled under an earlier bound."""

    def after_step(self, metrics: Mapping[str, float | None], oldest_age: int) -> tuple[AgeTuner, str]:
        """Return the state after a step, and a sentence that says what changed and why. The sentence is empty if the
        bound is the same. ``metrics`` are the step's metrics by name, and ``oldest_age`` is the largest age of a token
        that the step trained.

        >>> tuner = AgeTuner(settings=AgeTuning(), max_age=2)
        >>> tuner, why = tuner.after_step({"ess": 0.5, "stale_k3": 0.001}, oldest_age=2)
        >>> tuner.max_age, why
        (1, 'max_age 2 → 1: effective sample size 0.5 < 0.9')
        """
        if self.ignored_steps:
            return replace(self, ignored_steps=self.ignored_steps - 1), ""
        ess, kl = _number(metrics, "ess"), _number(metrics, "staleness_k3", "stale_k3")
        if oldest_age == 0 or (ess is None and kl is None):
            return self, ""  # the step has no stale token, or no metric of staleness
        ess, kl = 1.0 if ess is None else ess, 0.0 if kl is None else kl
        if ess < self.settings.min_ess:
            return self._change_bound(-1, f"effective sample size {ess:.3g} < {self.settings.min_ess:g}")
        if kl > self.settings.max_kl:
            return self._change_bound(-1, f"KL of stale tokens {kl:.2g} > {self.settings.max_kl:g}")
        is_good = kl < self.settings.max_kl / 2 and oldest_age >= self.max_age
        tuner = replace(self, good=self.good + 1 if is_good else 0)
        if tuner.good < self.settings.patience:
            return tuner, ""
        why = f"{tuner.good} good steps in a row reached it; the last: effective sample size {ess:.3g}, KL {kl:.2g}"
        return tuner._change_bound(1, why)

    def _change_bound(self, change: int, why: str) -> tuple[AgeTuner, str]:
        """Return the state with the bound changed by ``change`` versions, limited to the range from 1 to the limit of
        the settings, and a sentence that says what has changed and ``why``. The sentence is empty if the bound is the
        same."""
        new = min(self.settings.limit, max(1, self.max_age + change))
        if new == self.max_age:
            return replace(self, good=0), ""
        words = f"max_age {self.max_age} → {new}: {why}"
        return replace(self, max_age=new, good=0, ignored_steps=max(new, self.max_age)), words


def _number(metrics: Mapping[str, float | None], *names: str) -> float | None:
    """Return the value of the first metric among ``names`` that has a value; ``None`` if no metric has one."""
    return next((value for name in names if (value := metrics.get(name)) is not None), None)
