"""Losses that use no reward: likelihood, preference, and the divergence from a teacher ν or a reference π_ref.

A loss is called with the columns of a micro-batch and returns one value per token, to be minimised. π is the policy in
training. N tokens, S samples, G groups (pairs), K likeliest entries of the teacher.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Column, LossInputs, Ratio, TokenLoss, log_ratio
from headrace.algo.divergence import Estimator, estimate
from headrace.algo.losses.section import LossSection, refuse_idle
from headrace.base.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


class Ce(LossSection):
    """Cross-entropy: supervised learning of the tokens in the mask.

    −log π. Advantages are not used. This loss is for demonstrations, in your own training loop. A run has only sampled
    text, and refuses it. Source: maximum likelihood."""

    kind: Literal["ce"] = "ce"
    """The name that selects this loss."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −log π."""
        return TokenLoss(tokens_N=-inputs.log_pi_N)


class Dpo(LossSection):
    """DPO's loss: it learns from pairs of samples, one of which is preferred to the other.

    −log σ(β·(Δ_chosen − Δ_rejected)), Δ = Σ over the sequence of log π/π_ref, for every token of the pair.

    In each group exactly one sample is chosen (advantage above 0) and one rejected (below 0). With the reduction by
    prompt, the batch's loss is the mean over pairs. A pair in which one sample has no token left has loss 0 and is
    counted (``dpo_dropped``). Source: Rafailov et al., arXiv 2305.18290, eq. 7.
    """

    kind: Literal["dpo"] = "dpo"
    """The name that selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """β, the strength of the regularisation towards the reference."""
    reduction: ClassVar[str] = "prompt_mean"

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_ref, and the pairs of samples."""
        return frozenset({"log_ref", "pairs"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the loss of its pair: −log σ of β times the difference of the
        log-ratios to the reference. The metrics are the fraction of pairs whose chosen sample has the larger log-ratio,
        and the fraction of incomplete pairs."""
        assert inputs.log_ref_N is not None
        assert inputs.groups_S is not None
        groups, pairs_S = inputs.groups_S.unique(return_inverse=True)
        side_S = inputs.mean_S(inputs.advantages_N).sign()
        gap_S = inputs.sum_S(log_ratio(inputs.log_pi_N, inputs.log_ref_N))
        empty_S = inputs.sum_S(gap_S.new_ones(len(inputs.mask_N))) == 0
        whole_G = _complete_pairs(side_S, empty_S, pairs_S)
        margin_G = self.beta * gap_S.new_zeros(len(groups)).index_add(0, pairs_S, side_S * gap_S)
        loss_G = (-margin_G).logaddexp(margin_G.new_zeros(())).masked_fill(~whole_G, 0.0)
        metrics = {
            "dpo_accuracy": Ratio((whole_G & (margin_G.detach() > 0)).sum(), whole_G.sum()),
            "dpo_dropped": Ratio((~whole_G).sum(), float(len(groups))),
        }
        return TokenLoss(tokens_N=loss_G[pairs_S][inputs.samples_N], metrics=metrics)


def _complete_pairs(side_S: Tensor, empty_S: Tensor, pairs_S: Tensor) -> Tensor:
    """Return, for each group, whether it is a complete pair of one chosen (+1) and one rejected (−1) sample. ``side_S``
    is the side of each sample, 0 for none; ``empty_S`` is true for samples without a token with loss; ``pairs_S`` is
    the group of each sample. A group may be incomplete because one of its samples is empty. Raises :class:`DataError`
    for any other group that is not a pair."""
    num_groups = int(pairs_S.max()) + 1 if len(pairs_S) else 0
    count_G, balance_G, empty_G = (
        side_S.new_zeros(num_groups).index_add(0, pairs_S, values_S.to(side_S.dtype))
        for values_S in (side_S.abs(), side_S, empty_S)
    )
    whole_G = (count_G == 2) & (balance_G == 0)
    if not bool((whole_G | ((empty_G > 0) & (count_G < 2))).all()):
        raise DataError(
            "dpo found a group without exactly one chosen and one rejected sample",
            remedy="give pairs: advantage +1 and -1, one of each in every group, in one micro-batch",
        )
    return whole_G


class Distill(LossSection):
    """Distillation of a teacher's K likeliest entries, with the remaining probability as one more entry.

    D(ν, π) over the teacher's top K and the tail: forward Σ ν·log(ν/π), reverse Σ π·log(π/ν), or
    jsd β·KL(ν‖m) + (1−β)·KL(π‖m) with m = β·ν + (1−β)·π. Advantages are not used.

    Source: Agarwal et al. (GKD), arXiv 2306.13649, eq. 1–3; the tail makes both sides probability distributions.
    """

    kind: Literal["distill"] = "distill"
    """The name that selects this loss."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """The divergence: ``forward`` covers all modes of the teacher, ``reverse`` prefers one mode, ``jsd`` is between the
    two."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """β, the weight of the teacher in the mixture; used only by ``jsd``."""

    @pydantic.model_validator(mode="after")
    def _mixture_is_used(self) -> Distill:
        """Refuse a ``beta`` without effect, because the divergence is not ``jsd``."""
        if self.divergence != "jsd":
            refuse_idle(self, "beta", 'divergence = "jsd"')
        return self

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: both distributions over the teacher's likeliest entries."""
        return frozenset({"top_k"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the divergence of π from the teacher over the teacher's K likeliest entries
        and the tail, all other entries together."""
        assert inputs.log_pi_NK is not None
        assert inputs.log_nu_NK is not None
        log_pi_NK, log_nu_NK = append_tail(inputs.log_pi_NK), append_tail(inputs.log_nu_NK)
        match self.divergence:
            case "forward":
                return TokenLoss(tokens_N=kl_over(log_nu_NK, log_pi_NK))
            case "reverse":
                return TokenLoss(tokens_N=kl_over(log_pi_NK, log_nu_NK))
            case "jsd":
                mixed_NK = (log_nu_NK + math.log(self.beta)).logaddexp(log_pi_NK + math.log1p(-self.beta))
                teacher_N, policy_N = kl_over(log_nu_NK, mixed_NK), kl_over(log_pi_NK, mixed_NK)
                return TokenLoss(tokens_N=self.beta * teacher_N + (1 - self.beta) * policy_N)


def append_tail(log_p_NK: Tensor) -> Tensor:
    """Return ``log_p_NK``, the log-probabilities of K entries, with an additional column for the tail, all other
    entries together. They are bounded, so that they stay finite: those of the K entries are at least −60, and the
    probability of the tail is at least 1e-7."""
    mass_N = log_p_NK.exp().sum(dim=1, keepdim=True).clamp(max=1 - 1e-7)
    tail_N = (-mass_N).log1p()
    wide = log_p_NK.new_empty((log_p_NK.shape[0], log_p_NK.shape[1] + 1))
    wide = wide.slice_scatter(log_p_NK.clamp(min=-60.0), dim=1, end=-1)
    return wide.slice_scatter(tail_N, dim=1, start=-1)


def kl_over(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """Return KL(p‖q) of every row, from the log-probabilities of its entries, log p (``log_p_NK``) and log q
    (``log_q_NK``)."""
    return (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(dim=1)


class RefKl(LossSection):
    """The divergence from a reference policy as the whole loss.

    KL(π‖π_ref) by k1 = −x, k2 = x²/2 or k3 = eˣ−1−x, x = log π_ref − log π. Advantages are not used.

    Source: Schulman (2020), "Approximating KL divergence"; unbiased form: DeepSeek-V3.2, eq. 7.
    """

    kind: Literal["ref_kl"] = "ref_kl"
    """The name that selects this loss."""
    kl: Estimator = "k3"
    """The estimator. On samples of π, ``k2`` has the gradient of the divergence itself."""
    unbiased_kl: bool = False
    """Whether to multiply the estimate by π/π_old, which makes its gradient unbiased."""

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_ref, and log π_old if the ratio is used."""
        return frozenset({"log_ref", "log_old"}) if self.unbiased_kl else frozenset({"log_ref"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the estimate of KL(π‖π_ref), times π/π_old with ``unbiased_kl``."""
        assert inputs.log_ref_N is not None
        tokens_N = estimate(self.kl, inputs.log_pi_N, inputs.log_ref_N)
        return TokenLoss(tokens_N=inputs.log_ratio_N().exp() * tokens_N if self.unbiased_kl else tokens_N)
