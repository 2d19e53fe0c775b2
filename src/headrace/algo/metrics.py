"""The metrics of a micro-batch, as sums that can be added over micro-batches and ranks.

log π/μ differs from 0 for two reasons, which are reported separately. The engine's log-probabilities differ slightly
from the learner's (``mismatch``, the only reason for tokens of age 0), and the weights have changed since sampling
(``staleness``, an additional reason for tokens of higher age). π is the policy in training, μ the policy that sampled
the token. A metric is a ``Ratio``, a total and a count. :data:`headrace.base.types.metrics.LOSS_METRICS` describes each
metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.algo.base import LossInputs, Ratio, log_ratio
from headrace.algo.divergence import estimate

if TYPE_CHECKING:
    from torch import Tensor

AGE_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8))
"""The lowest and highest age of each bucket; an additional bucket contains all higher ages."""


def off_policy(inputs: LossInputs, log_learner_N: Tensor) -> dict[str, Ratio]:
    """Return metrics of the distance of two policies from μ over the mask of ``inputs``. For π: KL(μ‖π) by k1 and k3,
    and the moments of w = π/μ, for tokens (also by age) and for sequences. For the learner before this step, whose
    log-probabilities are ``log_learner_N``: k1 and k3, separately for tokens of age 0 and of higher ages."""
    mask_N = inputs.mask_N
    x_N = log_ratio(inputs.log_pi_N.detach(), inputs.log_mu_N)
    w_N = x_N.exp()
    rho_N = log_ratio(log_learner_N, inputs.log_mu_N)
    k3_N = rho_N.expm1() - rho_N
    fresh_N = mask_N & (inputs.ages_N() <= 0)
    stale_N = mask_N & ~fresh_N
    sampled_S = inputs.sum_S(mask_N.to(x_N.dtype)) > 0
    w_S = inputs.sum_S(x_N).clamp(-20.0, 20.0).exp()
    return {
        "kl_mu_k1": _mean(-x_N, mask_N),
        "mismatch_k1": _mean(-rho_N, fresh_N),
        "mismatch_k3": _mean(k3_N, fresh_N),
        "stale_k1": _mean(-rho_N, stale_N),
        "stale_k3": _mean(k3_N, stale_N),
        **average_by_age("kl_mu_k3", x_N.expm1() - x_N, inputs),
        **average_by_age("ratio_mu", w_N, inputs),
        **average_by_age("ratio_mu_squared", w_N.square(), inputs),
        "sequence_ratio_mu": _mean(w_S, sampled_S),
        "sequence_ratio_mu_squared": _mean(w_S.square(), sampled_S),
    }


def kl_ref(log_pi_N: Tensor, log_ref_N: Tensor, mask_N: Tensor) -> Ratio:
    """Return the mean of the k3 estimate of KL(π‖π_ref) over the tokens in the mask, from log π (``log_pi_N``) and log
    π_ref (``log_ref_N``)."""
    return _mean(estimate("k3", log_pi_N, log_ref_N), mask_N)


def average_by_age(name: str, values_N: Tensor, inputs: LossInputs) -> dict[str, Ratio]:
    """Return the mean of ``values_N`` over the mask of ``inputs``, and over the tokens of each bucket of ages, by
    metric: ``name``, ``name/age_3-4``, ..."""
    kept_N = values_N.to(inputs.log_pi_N.dtype).masked_fill(~inputs.mask_N, 0.0)
    counted_N = inputs.mask_N.to(kept_N.dtype)
    ages_N = inputs.ages_N()
    bucket_N = ages_N.new_zeros(ages_N.shape)
    for _, high in AGE_BUCKETS:
        bucket_N = bucket_N + (ages_N > high)
    sums_B, counts_B = (
        kept_N.new_zeros(len(AGE_BUCKETS) + 1).index_add(0, bucket_N, column_N) for column_N in (kept_N, counted_N)
    )
    names = [f"age_{low}" if low == high else f"age_{low}-{high}" for low, high in AGE_BUCKETS]
    buckets = zip([*names, f"age_{AGE_BUCKETS[-1][1] + 1}+"], sums_B, counts_B, strict=True)
    whole = {name: Ratio(kept_N.sum(), inputs.mask_N.sum())}
    return whole | {f"{name}/{bucket}": Ratio(total, count) for bucket, total, count in buckets}


def add(parts: Iterable[Mapping[str, Ratio]]) -> dict[str, Ratio]:
    """Return the combined metrics of ``parts``, the metrics of several micro-batches or ranks: for each name, the sum
    of the totals and the sum of the counts."""
    out: dict[str, Ratio] = {}
    for metrics in parts:
        for name, ratio in metrics.items():
            have = out.get(name)
            out[name] = ratio if have is None else Ratio(have.total + ratio.total, have.count + ratio.count)
    return out


def means(metrics: Mapping[str, Ratio]) -> dict[str, float]:
    """Return every metric as a number, its total divided by its count, together with the metrics of
    :func:`derived_metrics`. A metric with a count of 0 is left out."""
    totals = _as_floats([ratio.total for ratio in metrics.values()] + [ratio.count for ratio in metrics.values()])
    pairs = zip(metrics, totals[: len(metrics)], totals[len(metrics) :], strict=True)
    out = {name: total / count for name, total, count in pairs if count > 0}
    return out | derived_metrics(out)


def _as_floats(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values as Python numbers, in order. All tensors on a GPU are copied in one transfer, since each
    transfer waits for the GPU."""
    tensors = [value.detach().double() for value in values if not isinstance(value, int | float)]
    if not tensors:
        return [float(value) for value in values]
    import torch  # only here: a controller has plain numbers, and does not load torch

    fetched = iter(torch.stack(tensors).cpu().tolist())
    return [float(value) if isinstance(value, int | float) else next(fetched) for value in values]


def derived_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are functions of other metrics' means: ``ess``, the effective sample size as a fraction,
    E[w]²/E[w²], of all tokens and by age; ``ess_sequences``, that of whole sequences; ``chi2``, E[w²]/E[w]² − 1; and
    ``staleness_k1`` and ``staleness_k3``, the value of stale tokens minus the value of tokens of age 0, if there are
    tokens of both kinds.

    >>> derived_metrics({"ratio_mu": 1.0, "ratio_mu_squared": 1.25})
    {'ess': 0.8, 'chi2': 0.25}
    """
    out: dict[str, float] = {}
    for name, squared in means.items():
        stem, _, age = name.partition("/")
        if stem == "ratio_mu_squared":
            out[f"ess/{age}" if age else "ess"] = means[name.replace("_squared", "")] ** 2 / squared
    if "sequence_ratio_mu_squared" in means:
        out["ess_sequences"] = means["sequence_ratio_mu"] ** 2 / means["sequence_ratio_mu_squared"]
    if "ratio_mu_squared" in means:
        out["chi2"] = means["ratio_mu_squared"] / means["ratio_mu"] ** 2 - 1
    for kind in ("k1", "k3"):
        if f"stale_{kind}" in means and f"mismatch_{kind}" in means:
            out[f"staleness_{kind}"] = means[f"stale_{kind}"] - means[f"mismatch_{kind}"]
    return out


def _mean(values_N: Tensor, mask_N: Tensor) -> Ratio:
    """Return the mean of ``values_N`` over the mask, as a total and a count."""
    return Ratio(values_N.masked_fill(~mask_N, 0.0).sum(), mask_N.sum())
