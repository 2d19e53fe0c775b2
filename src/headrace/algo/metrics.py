"""What is measured of every micro-batch, in sums that add up over micro-batches and ranks.

log π/μ has two causes: the engine's numbers are not the learner's (``mismatch``: seen alone on tokens of age 0), and
the weights have moved since (``staleness``: what tokens of higher age show beyond it). They are reported apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from headrace.algo.base import LossInputs, Ratio, log_ratio
from headrace.algo.divergence import estimate

if TYPE_CHECKING:
    from torch import Tensor

AGE_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8))
"""Lowest and highest age of each bucket; above the last is one more."""


METRICS = {
    "kl_mu_k1, kl_mu_k3": "KL(μ‖π): mean of −log w, and of w − 1 − log w",
    "mismatch_k1, mismatch_k3": "the same of the learner before this step instead of π, over tokens of age 0: there "
    "nothing but engine and learner themselves is apart",
    "stale_k1, stale_k3": "the same over tokens of higher age",
    "staleness_k1, staleness_k3": "stale − mismatch: what the age added; only where both were measured",
    "ratio_mu, ratio_mu_squared": "means of w and w²",
    "ess": "effective sample size as a fraction, E[w]²/E[w²]",
    "chi2": "E[w²]/E[w]² − 1 = 1/ess − 1",
    "correction_weight, correction_rejected": "mean factor of the corrections; fraction of tokens whose factor is 0",
    "clip_frac, clip_frac/age_...": "fraction of tokens at a bound of the loss; the same by age",
    "entropy": "mean entropy of π, where it is known",
    "kl_ref": "KL(π‖π_ref) by the penalty's estimator; by k3 where there is a reference and no penalty",
    "kl_teacher": "mean of log μ − log ν, with the advantage `reverse_kl`: KL(μ‖ν)",
    "teacher_version": "newest version in the weights of a teacher that is this model's own past: that of every token "
    "of the step",
    "explained_variance": "of a critic, before it learns from the batch: 1 − Var(R − V)/Var(R), R discounted to the "
    "token; missing where that has no variance",
    "value_loss, value_mean, critic_grad_norm": "mean of ½·(V − return)²; mean of V; norm of the critic's gradient",
    "routing_differs": "in a mixture of experts: fraction of pairs of token and layer at which the router would now "
    "choose other experts than the recorded ones, which compute",
    "dpo_accuracy, dpo_dropped": "fraction of pairs whose chosen side gained more; fraction of pairs left out",
}
"""What the metrics of a loss mean, for the document of formulas."""


def off_policy(inputs: LossInputs, log_learner_N: Tensor) -> dict[str, Ratio]:
    """Distance of π from μ over the mask: KL(μ‖π) by k1 and k3, and moments of w = π/μ; and the distance of the learner
    before this step (``log_learner_N``) from μ, split by cause.
    """
    mask_N = inputs.mask_N
    x_N = log_ratio(inputs.log_pi_N.detach(), inputs.log_mu_N)
    w_N = x_N.exp()
    rho_N = log_ratio(log_learner_N, inputs.log_mu_N)
    k3_N = rho_N.expm1() - rho_N
    fresh_N = mask_N & (inputs.ages_N() <= 0)
    stale_N = mask_N & ~fresh_N
    return {
        "kl_mu_k1": _mean(-x_N, mask_N),
        "kl_mu_k3": _mean(x_N.expm1() - x_N, mask_N),
        "mismatch_k1": _mean(-rho_N, fresh_N),
        "mismatch_k3": _mean(k3_N, fresh_N),
        "stale_k1": _mean(-rho_N, stale_N),
        "stale_k3": _mean(k3_N, stale_N),
        "ratio_mu": _mean(w_N, mask_N),
        "ratio_mu_squared": _mean(w_N.square(), mask_N),
    }


def kl_ref(log_pi_N: Tensor, log_ref_N: Tensor, mask_N: Tensor) -> Ratio:
    """KL(π‖π_ref) over the mask, by k3."""
    return _mean(estimate("k3", log_pi_N, log_ref_N), mask_N)


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
    """Every metric as a number, those that no token contributed to left out; with :func:`derived` ones."""
    counts = {name: float(ratio.count) for name, ratio in metrics.items()}
    out = {name: float(ratio.total) / counts[name] for name, ratio in metrics.items() if counts[name] > 0}
    return out | derived(out)


def derived(means: Mapping[str, float]) -> dict[str, float]:
    """What follows from the means: ``ess``, the effective sample size as a fraction, E[w]²/E[w²]; ``chi2``, E[w²]/E[w]²
    − 1; ``staleness_k1`` and ``staleness_k3``, what stale tokens show beyond the mismatch of fresh ones, where there
    are tokens of both kinds.

    >>> derived({"ratio_mu": 1.0, "ratio_mu_squared": 1.25})
    {'ess': 0.8, 'chi2': 0.25}
    """
    out: dict[str, float] = {}
    if "ratio_mu_squared" in means:
        out["ess"] = means["ratio_mu"] ** 2 / means["ratio_mu_squared"]
        out["chi2"] = means["ratio_mu_squared"] / means["ratio_mu"] ** 2 - 1
    for kind in ("k1", "k3"):
        if f"stale_{kind}" in means and f"mismatch_{kind}" in means:
            out[f"staleness_{kind}"] = means[f"stale_{kind}"] - means[f"mismatch_{kind}"]
    return out


def _mean(values_N: Tensor, mask_N: Tensor) -> Ratio:
    return Ratio(values_N.masked_fill(~mask_N, 0.0).sum(), mask_N.sum())
