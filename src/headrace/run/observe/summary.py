"""The part of ``summary.json`` that follows from the steps alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.base.types.observation import Account, StepRecord


def commit_gap_ms(gaps_s: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile (linear between ranks) of commit gaps, in milliseconds; ``None`` without any.

    >>> commit_gap_ms([0.001, 0.002, 0.003])
    {'p50': 2.0, 'p99': 2.98}
    """
    if not gaps_s:
        return {"p50": None, "p99": None}
    return {f"p{rank}": round(float(np.percentile(gaps_s, rank)) * 1e3, 6) for rank in (50, 99)}


def age_histogram(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of histograms, ages rising.

    >>> age_histogram([{1: 5}, {0: 2, 1: 1}])
    {0: 2, 1: 6}
    """
    total: dict[int, int] = {}
    for histogram in histograms:
        for age, tokens in histogram.items():
            total[age] = total.get(age, 0) + tokens
    return dict(sorted(total.items()))


def evaluations(steps: Sequence[StepRecord], summary: Mapping[str, Any]) -> list[tuple[int, float]]:
    """(version, mean held-out reward) of every evaluation; with those that a ``summary`` tells of, before the run and
    after it."""
    points = {
        step.version if step.eval_version is None else step.eval_version: step.eval_accuracy
        for step in steps
        if step.eval_accuracy is not None
    }
    ends = {"eval_before": 0, "eval_after": steps[-1].version if steps else 0}
    told = {version: summary.get(key) for key, version in ends.items()}
    return sorted({**points, **{at: value for at, value in told.items() if isinstance(value, int | float)}}.items())


def per_second(amount: float, seconds: float) -> float:
    """``amount / seconds``; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


def observed(steps: Sequence[StepRecord], wall_s: float) -> dict[str, Any]:
    """The keys of ``summary.json`` that the steps decide; ``wall_s`` is the time from the first rollout to the last
    step, in seconds. A number that no step has is ``None``.

    ``reward_first`` is the mean reward of the first step that has one, ``reward_last`` that of the last tenth of them;
    ``mismatch_kl`` is the mean over the steps that report it; ``exposed_sync_frac`` is the fraction of ``wall_s`` that
    the learner stood still for the sync.
    """
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    kls = [kl for step in steps if (kl := step.metrics.get("mismatch_kl")) is not None]
    ages = age_histogram(step.ages for step in steps)
    trained = sum(step.trained_tokens for step in steps)
    generated = steps[-1].generated_tokens if steps else 0
    return {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": float(np.mean(rewards[-max(1, len(rewards) // 10) :])) if rewards else None,
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


def figures_of(account: Account) -> dict[str, Any]:
    """The keys of ``summary.json`` that an account decides: those of one interval, from the first rollout to the end of
    the last step. Every view takes them from here, so that they agree with the verdict."""
    return {
        "tokens_generated": account.generated_tokens,
        "tokens_trained": account.trained_tokens,
        "wall_s": account.seconds,
        "generated_tok_s": account.per_second(account.generated_tokens),
        "trained_tok_s": account.per_second(account.trained_tokens),
        "engine_idle_frac": account.engine_idle,
        "learner_idle_frac": account.learner_idle,
        "exposed_sync_frac": account.of_time(account.exposed_sync_s),
    }
