"""Counts of failures, and logged values, of the components of the reward.

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
from headrace.rollout.runner import find_remedy
from headrace.rollout.scoring import Graded


class RewardFailures(msgspec.Struct, kw_only=True):
    """The number of failures of one component of the reward in this life of the run (since it was last started or
    resumed)."""

    failed: int = 0
    """Number of calls that failed even after the component's ``retries``."""
    calls: int = 0
    """Number of calls."""
    first_cause: str = ""
    """The cause of the first failure; empty if no call failed."""

    def __str__(self) -> str:
        """Return the end of a sentence with the counts and the first cause."""
        return f"failed for {self.failed} of {self.calls}; the first: {self.first_cause}"


@dataclass(slots=True, kw_only=True)
class RewardCounts:
    """Counters of the failures and the logged values of the reward's components, updated for each answer."""

    max_failing_calls: int = 0
    """Number of calls after which a component that has failed in every call ends the run; 0: it never does."""
    components: dict[str, RewardFailures] = field(default_factory=dict)
    """The counts of every component that was called, by name."""
    _recent_failures: dict[str, list[bool]] = field(default_factory=dict)
    """For each call of a component since the last step, whether it failed; by the name of the component."""
    _logged: dict[str, list[float]] = field(default_factory=dict)
    """The values that reward functions logged with ``log_metric`` since the last step, by name."""

    def add(self, graded: Graded, warn: Callable[[str, str], None]) -> None:
        """Count the calls of the reward's components for one answer. ``warn`` is called with a text and a kind for each
        failure that does not make the episode fail.

        Raises :class:`~headrace.base.errors.EnvError` for an optional component that has failed in each of its first
        ``max_failing_calls`` calls or more, because the model would be trained on the component's default value alone.
        """
        for name, values in graded.metrics.items():
            self._add_metric(name, values, warn)
        for label, failures in graded.calls.items():
            counts = self.components.setdefault(label, RewardFailures())
            counts.calls += len(failures)
            self._recent_failures.setdefault(label, []).extend(map(bool, failures))
            for failure in filter(None, failures):
                counts.failed += 1
                counts.first_cause = counts.first_cause or failure
                if graded.reward is not None:
                    reason_and_error = ": ".join(failure.split(": ")[:2])
                    warn(
                        f"the reward {label!r} failed and counts as its default: {failure}",
                        f"{label} fails: {reason_and_error}",
                    )
            if (
                graded.reward is not None
                and self.max_failing_calls
                and counts.failed == counts.calls >= self.max_failing_calls
            ):
                raise EnvError(
                    f"the reward {label!r} has failed for each of the first {counts.calls} answers, and counts as its "
                    f"default: the model would be trained on that alone; the first failure: {counts.first_cause}",
                    remedy=f"{find_remedy(counts.first_cause)}, or take the component out; then --resume",
                )

    def _add_metric(self, name: str, values: tuple[float, ...], warn: Callable[[str, str], None]) -> None:
        """Add ``values``, which a reward function logged under ``name``. Values that are not finite are skipped, and
        ``warn`` is called with a text and a kind of warning."""
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values):
            text = f"a reward gave log_metric({name!r}) a value that is not finite, which counts in no mean"
            warn(text, text)
        self._logged.setdefault(f"logged/{as_label(name)}", []).extend(finite)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the previous call, by name: the fraction of failed calls of each component, and the
        mean of each logged value. Then reset these counts. It is called for the record of each step."""
        failures, self._recent_failures = self._recent_failures, {}
        logged, self._logged = self._logged, {}
        shares = {f"reward_failed/{as_label(label)}": sum(failed) / len(failed) for label, failed in failures.items()}
        return shares | {name: sum(values) / len(values) for name, values in logged.items() if values}

    def get_failing(self) -> Mapping[str, RewardFailures]:
        """Return the components that have failed at least once, with their counts, by name."""
        return {label: counts for label, counts in self.components.items() if counts.failed}
