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
    """The failures of one component of the reward, counted in this life of the run (since it was last started)."""

    failed: int = 0
    """Number of calls that failed, also after the component's ``retries``."""
    calls: int = 0
    """Number of calls."""
    first_cause: str = ""
    """The cause of the first failure; empty if there is none."""

    def __str__(self) -> str:
        """Return the counts and the first cause as the end of a sentence."""
        return f"failed for {self.failed} of {self.calls}; the first: {self.first_cause}"


@dataclass(slots=True, kw_only=True)
class RewardCounts:
    """Counts the failures and the logged values of the reward's components, answer by answer."""

    most: int = 0
    """Number of calls after which a component that has failed in every one ends the run; 0: it never does."""
    components: dict[str, RewardFailures] = field(default_factory=dict)
    """The counts of every component that was called, by name."""
    _fresh: dict[str, list[bool]] = field(default_factory=dict)
    """For each component by name, whether each of its calls since the last step failed."""
    _logged: dict[str, list[float]] = field(default_factory=dict)
    """The values that ``log_metric`` got since the last step, by name."""

    def add(self, graded: Graded, warn: Callable[[str, str], None]) -> None:
        """Count the calls of the reward's components for one answer. ``warn`` is called with the text and the kind of
        each failure that does not make the episode fail.

        Raises :class:`~headrace.base.errors.EnvError` for an optional component that has failed in each of its first
        calls, as many as a batch has: the run would be trained on the component's default value alone.
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
        """Add ``values``, which a reward function logged under ``name``. Values that are not finite are left out, and
        ``warn`` is called with a text and a kind."""
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values):
            words = f"a reward gave log_metric({name!r}) a value that is not finite, which counts in no mean"
            warn(words, words)
        self._logged.setdefault(f"logged/{as_label(name)}", []).extend(finite)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the previous call, by name: the share of failed calls of each component, and the
        mean of each logged value. Then start to count again; the record of each step calls this."""
        fresh, self._fresh = self._fresh, {}
        logged, self._logged = self._logged, {}
        shares = {f"reward_failed/{as_label(label)}": sum(failed) / len(failed) for label, failed in fresh.items()}
        return shares | {name: sum(values) / len(values) for name, values in logged.items() if values}

    def failing(self) -> Mapping[str, RewardFailures]:
        """Return the components that have failed at least once, with their counts, by name."""
        return {label: counts for label, counts in self.components.items() if counts.failed}
