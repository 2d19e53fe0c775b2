"""Functions that compute figures of ``summary.json`` from the records of the steps: rates, ages, gaps, evaluations.

The *version* of the weights is a number: step k makes version k + 1. The *age* of a trained token is the learner's
version minus the version that sampled it. A *life* of a run is the time from one start or resumption to its end.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.base.types.metrics import last_tenth
from headrace.base.types.observation import Event, StepRecord


def commit_gap_ms(gaps_s: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the 99th percentile (linear between ranks) of commit gaps, in milliseconds; ``None`` for
    both if ``gaps_s`` is empty. A commit gap is the time for which the engine's step loop stood still to commit new
    weights; ``gaps_s`` is in seconds.

    >>> commit_gap_ms([0.001, 0.002, 0.003])
    {'p50': 2.0, 'p99': 2.98}
    """
    if not gaps_s:
        return {"p50": None, "p99": None}
    return {f"p{rank}": round(float(np.percentile(gaps_s, rank)) * 1e3, 6) for rank in (50, 99)}


def age_histogram(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of several histograms of token ages, in the order of rising age. Each maps an age, in versions, to
    the number of trained tokens of that age.

    >>> age_histogram([{1: 5}, {0: 2, 1: 1}])
    {0: 2, 1: 6}
    """
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


_EVALUATED = re.compile(r"held-out mean reward (-?[0-9.]+) at version ([0-9]+)")
"""Matches the text of the event that the controller records after each evaluation: the mean reward and the version."""


def evaluations(
    steps: Sequence[StepRecord], summary: Mapping[str, Any], events: Iterable[Event] = ()
) -> list[tuple[int, float]]:
    """Return (version, mean reward on held-out tasks) for every evaluation in all lives of a run, ordered by version.
    ``steps`` are its records, ``summary`` is the content of ``summary.json``, and ``events`` are all its events.

    The evaluation at the end of a life belongs to no step, and a later life replaces the ``summary``, so this
    evaluation is read from ``events``. Events of versions after the last step are skipped: these versions were
    discarded when the run was resumed from an older snapshot.
    """
    last = steps[-1].version if steps else 0
    matches = [match for event in events if (match := _EVALUATED.fullmatch(event.text))]
    points = {int(match[2]): float(match[1]) for match in matches if int(match[2]) <= last}
    points |= {
        step.version if step.eval_version is None else step.eval_version: step.eval_accuracy
        for step in steps
        if step.eval_accuracy is not None
    }
    ends = {0: summary.get("eval_before"), last: summary.get("eval_after")}
    points |= {version: value for version, value in ends.items() if isinstance(value, int | float)}
    return sorted(points.items())


def per_second(amount: float, seconds: float) -> float:
    """Return ``amount / seconds``; 0 if no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


def summarize_steps(steps: Sequence[StepRecord], wall_s: float) -> dict[str, Any]:
    """Return the keys of ``summary.json`` that follow from the steps.

    ``steps`` are the records of all steps, and ``wall_s`` is the time from the first rollout to the last step, in
    seconds. A figure that no step has measured is ``None``.
    ``reward_first`` is the mean reward of the first step with a reward, and ``reward_last`` the mean over the last
    tenth of these steps; ``mismatch_kl`` is the mean over the steps that report it; ``exposed_sync_frac`` is the
    fraction of ``wall_s`` in which the learner was blocked by the sync.
    """
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    kls = [kl for step in steps if (kl := step.metrics.get("mismatch_kl")) is not None]
    ages = age_histogram(step.ages for step in steps)
    trained = sum(step.trained_tokens for step in steps)
    generated = steps[-1].generated_tokens if steps else 0
    return {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": last_tenth(rewards),
        "steps": len(steps),
        "tokens_generated": generated,
        "tokens_trained": trained,
        "wall_s": wall_s,
        "generated_tok_s": per_second(generated, wall_s),
        "trained_tok_s": per_second(trained, wall_s),
        "commit_gap_ms": commit_gap_ms([step.commit_gap_s for step in steps if step.commit_gap_s is not None]),
        "exposed_sync_frac": per_second(sum(step.exposed_sync_s for step in steps), wall_s),
        "max_token_age": max(ages, default=None),
        "age_histogram": {str(age): tokens for age, tokens in ages.items()},
        "mismatch_kl": float(np.mean(kls)) if kls else None,
    }
