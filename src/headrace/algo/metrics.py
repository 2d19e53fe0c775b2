"""What is measured of every micro-batch, in sums that add up over micro-batches and ranks.

log π/μ has two causes: the engine's numbers are not the learner's (``mismatch``: seen alone on tokens of age 0), and
the weights have moved since (``staleness``: what tokens of higher age show beyond it). They are reported apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headrace.algo.base import LossInputs, Ratio, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

AGE_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8))
"""Lowest and highest age of each bucket; above the last is one more."""


def off_policy(inputs: LossInputs) -> dict[str, Ratio]:
    """Distance of π from μ over the mask: KL(μ‖π) by k1 and k3, split by cause; moments of w = π/μ."""
    mask_N = inputs.mask_N
    x_N = log_ratio(inputs.log_pi_N.detach(), inputs.log_mu_N)
    w_N = x_N.exp()
    k3_N = x_N.expm1() - x_N
    fresh_N = mask_N & (inputs.ages_N() <= 0)
    stale_N = mask_N & ~fresh_N
    return {
        "kl_mu_k1": _mean(-x_N, mask_N),
        "kl_mu_k3": _mean(k3_N, mask_N),
        "mismatch_k1": _mean(-x_N, fresh_N),
        "mismatch_k3": _mean(k3_N, fresh_N),
        "stale_k1": _mean(-x_N, stale_N),
        "stale_k3": _mean(k3_N, stale_N),
        "ratio_mu": _mean(w_N, mask_N),
        "ratio_mu_squared": _mean(w_N.square(), mask_N),
    }


def by_age(name: str, values_N: Tensor, inputs: LossInputs) -> dict[str, Ratio]:
    """The mean of ``values_N`` over the mask, and over each bucket of ages: ``name``, ``name/age_3-4``, ..."""
    values_N = values_N.to(inputs.log_pi_N.dtype)
    out = {name: _mean(values_N, inputs.mask_N)}
    ages_N = inputs.ages_N()
    for low, high in AGE_BUCKETS:
        inside_N = inputs.mask_N & (ages_N >= low) & (ages_N <= high)
        out[f"{name}/age_{low}" if low == high else f"{name}/age_{low}-{high}"] = _mean(values_N, inside_N)
    last = AGE_BUCKETS[-1][1] + 1
    out[f"{name}/age_{last}+"] = _mean(values_N, inputs.mask_N & (ages_N >= last))
    return out


def add(parts: Iterable[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """The metrics of several micro-batches or ranks as those of all."""
    out: dict[str, Ratio] = {}
    for metrics in parts:
        for name, ratio in metrics.items():
            have = out.get(name)
            out[name] = ratio if have is None else Ratio(have.total + ratio.total, have.count + ratio.count)
    return out


def means(metrics: Mapping[str, Ratio]) -> dict[str, float]:
    """Every metric as a number, those that no token contributed to left out; with what follows from them.

    ``ess`` is the effective sample size as a fraction, E[w]²/E[w²]; ``chi2`` is E[w²] − 1; ``staleness_k1`` and
    ``staleness_k3`` are what stale tokens show beyond the mismatch of fresh ones.
    """
    counts = {name: float(ratio.count) for name, ratio in metrics.items()}
    out = {name: float(ratio.total) / counts[name] for name, ratio in metrics.items() if counts[name] > 0}
    if "ratio_mu_squared" in out:
        out["ess"] = out["ratio_mu"] ** 2 / out["ratio_mu_squared"]
        out["chi2"] = out["ratio_mu_squared"] - 1
    for kind in ("k1", "k3"):
        if f"stale_{kind}" in out:
            out[f"staleness_{kind}"] = out[f"stale_{kind}"] - out.get(f"mismatch_{kind}", 0.0)
    return out


def _mean(values_N: Tensor, mask_N: Tensor) -> Ratio:
    return Ratio(values_N.masked_fill(~mask_N, 0.0).sum(), mask_N.sum())
