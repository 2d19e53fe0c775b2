"""Failures and logged values of the components of the reward.

every answer ──▶ calls of each component ──▶ counted, for summary and status; the first failure of a kind is a warning
                                          ──▶ a share of the step, for ``metrics.jsonl`` and the alarm ``rewards``
                                          ──▶ a component that fails for the whole first batch ends the run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.base.errors import EnvError
from headrace.base.types.metrics import as_label
from headrace.rollout.runner import remedy_of
from headrace.rollout.scoring import Graded


class RewardFailures(msgspec.Struct, kw_only=True):
    """Counts the failures of one component of the reward, in this life of the run."""

    failed: int = 0
    """Number of calls that failed, after ``retries`` more attempts."""
    calls: int = 0
    """Number of calls."""
    first_cause: str = ""
    """The cause of the first failure; empty if there is none."""

    def __str__(self) -> str:
        return f"failed for {self.failed} of {self.calls}; the first: {self.first_cause}"


@dataclass(slots=True, kw_only=True)
class RewardCounts:
    """Counts the failures and the logged values of the reward's components, call by call."""

    most: int = 0
    """Number of calls after which a component that has always failed ends the run; 0: it never does."""
    components: dict[str, RewardFailures] = field(default_factory=dict)
    """The counts of every component that was called, by name."""
    _fresh: dict[str, list[bool]] = field(default_factory=dict)
    """Whether each call since the last step failed, by component."""
    _logged: dict[str, list[float]] = field(default_factory=dict)
    """The values that ``log_metric`` got since the last step, by name."""

    def add(self, graded: Graded, warn: Callable[[str, str], None]) -> None:
        """Count the calls of one answer. ``warn`` is called with the text and the kind of each failure that fails no
        episode.

        Raises :class:`~headrace.base.errors.EnvError` for an optional component that has failed for each of its first
        calls, as many as a batch has: the run would be trained on its default alone.
        """
        for name, values in graded.metrics.items():
            self._add_metric(name, values, warn)
        for label, failures in graded.calls.items():
            counts = self.components.setdefault(label, RewardFailures())
            counts.calls += len(failures)
            self._fresh.setdefault(label, []).extend(map(bool, failures))
            for failure in filter(None, failures):
                counts.failed += 1
                counts.first_cause = counts.first_cause or failure
                if graded.reward is not None:
                    sort = ": ".join(failure.split(": ")[:2])
                    warn(f"the reward {label!r} failed and counts as its default: {failure}", f"{label} fails: {sort}")
            if graded.reward is not None and self.most and counts.failed == counts.calls >= self.most:
                raise EnvError(
                    f"the reward {label!r} has failed for each of the first {counts.calls} answers, and counts as its "
                    f"default: the model would be trained on that alone; the first failure: {counts.first_cause}",
                    remedy=f"{remedy_of(counts.first_cause)}, or take the component out; then --resume",
                )

    def _add_metric(self, name: str, values: tuple[float, ...], warn: Callable[[str, str], None]) -> None:
        """Add values that a reward function logged, without those that are not finite, of which ``warn`` is told."""
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values):
            words = f"a reward gave log_metric({name!r}) a value that is not finite, which counts in no mean"
            warn(words, words)
        self._logged.setdefault(f"logged/{as_label(name)}", []).extend(finite)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the previous call, and start to count again."""
        fresh, self._fresh = self._fresh, {}
        logged, self._logged = self._logged, {}
        shares = {f"reward_failed/{as_label(label)}": sum(failed) / len(failed) for label, failed in fresh.items()}
        return shares | {name: sum(values) / len(values) for name, values in logged.items() if values}

    def failing(self) -> Mapping[str, RewardFailures]:
        """Return the components that have failed at least once."""
        return {label: counts for label, counts in self.components.items() if counts.failed}
