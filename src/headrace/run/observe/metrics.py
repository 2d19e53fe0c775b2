"""The metrics of an optimizer step by their names, for writers, charts and alarms.

The *registry* is the table of all metrics: name, unit, meaning, and how the values of several steps are combined.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.types.metrics import REGISTRY, Metric, combine, find
from headrace.base.types.observation import StepRecord

_FIELDS = (
    *("wall_s", "reward_mean", "reward_sampled", "reward_std", "reward_min", "reward_max", "eval_accuracy"),
    *("eval_version", "trained_tokens", "generated_tokens", "seconds", "wait_s", "exposed_sync_s", "straggler_s"),
    *("held_back_s", "commit_gap_s", "length_mean"),
)
"""The fields of a step record that are one number each, and so metrics under their own names."""
_BY_REASON = ("dropped_groups", "set_aside_episodes", "dropped_tokens", "wasted_tokens")
"""The fields of a step record that are counts by reason."""


def flat(record: StepRecord) -> dict[str, float]:
    """Return every metric of the step in ``record`` by its name, such as ``reward_mean`` or ``age/0``: the fields of
    the record that are numbers, its histograms and counts by label, and the metrics of the loss. A metric that is
    ``None``, because it was not measured, is omitted.

    >>> record = StepRecord(step=0, version=1, clock_s=9.0, wall_s=4.0, reward_mean=0.5, ages={0: 8})
    >>> {name: value for name, value in flat(record).items() if value}
    {'wall_s': 4.0, 'reward_mean': 0.5, 'age/0': 8.0}
    """
    fields: dict[str, float | None] = {name: getattr(record, name) for name in _FIELDS}
    queue = record.queue
    fields |= {"queue/submitted": queue.submitted, "queue/running": queue.running, "queue/ready": queue.ready}
    fields |= {f"age/{age}": tokens for age, tokens in record.ages.items()}
    fields |= {f"{name}/{reason}": count for name in _BY_REASON for reason, count in getattr(record, name).items()}
    fields |= record.metrics
    return {name: float(value) for name, value in fields.items() if value is not None}


def combine_over_run(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return one value for each metric over all ``steps``, by its name: the sum, the mean, the maximum or the last
    value, as the registry defines for the metric. Steps that did not measure a metric are ignored for it."""
    values: dict[str, list[float]] = {}
    for record in steps:
        for name, value in flat(record).items():
            values.setdefault(name, []).append(value)
    return {name: combine(name, each) for name, each in values.items()}


def table() -> str:
    """Return the registry of all metrics as a Markdown table, one row for each, for the documents."""
    rows = [f"| `{row.name}` | {row.unit or '–'} | {row.aggregation} | {row.meaning}. |" for row in REGISTRY]
    return "\n".join(["| metric | unit | over steps | meaning |", "|---|---|---|---|", *rows, ""])


__all__ = ["REGISTRY", "Metric", "combine", "combine_over_run", "find", "flat", "table"]
