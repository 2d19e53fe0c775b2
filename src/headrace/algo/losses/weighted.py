"""Losses that multiply log π by a weight, or add a penalty on the ratio, instead of clipping a surrogate.

A loss is a record of settings (``[algo.loss]``). It is called with the columns of a micro-batch and returns one value
per token, to be minimised. π is the policy in training, μ the policy that sampled the token, A the advantage. r is
π/π_old or π/μ, as ``anchor`` says, and ``log_ratio_N(anchor)`` is log r. N tokens, S samples (sequences).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, TokenLoss
from headrace.algo.losses.section import AnchoredLoss, PolicyLoss, refuse_idle


class Reinforce(AnchoredLoss):
    """REINFORCE with a truncated importance ratio.

    −sg(min(r, C))·A·log π, r = π/μ.

    Source: Williams (1992); truncation: Espeholt et al. (IMPALA), arXiv 1802.01561, section 4.
    """

    kind: Literal["reinforce"] = "reinforce"
    """The name that selects this loss."""
    anchor: Anchor = "mu"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""
    ratio_cap: float = Field(default=2.0, gt=0)
    """C, the largest weight of a token."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −log π, weighted by its advantage and its truncated ratio, which carries no
        gradient. The result includes the mask of the truncated tokens."""
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp()
        weights_N = ratio_N.clamp(max=self.ratio_cap)
        return TokenLoss(
            tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N, clipped_N=ratio_N > self.ratio_cap
        )


class Cispo(AnchoredLoss):
    """CISPO's loss: the clipped ratio is only a weight, so that every token has a gradient.

    −sg(min(r, 1+ε_h))·A·log π; two-sided: −sg(clip(r, 1−ε, 1+ε_h))·A·log π.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; the wide bound: ScaleRL, arXiv 2510.13786.
    """

    kind: Literal["cispo"] = "cispo"
    """The name that selects this loss."""
    anchor: Anchor = "old"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""
    clip_high: float = Field(default=4.0, ge=0)
    """ε_h: the weight is at most 1 + ``clip_high``."""
    two_sided: bool = False
    """Whether to bound the weight from below at 1 − ``clip_low``, too."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε, the distance of the lower bound from 1; used only with ``two_sided``."""

    @pydantic.model_validator(mode="after")
    def _lower_bound_acts(self) -> Cispo:
        """Refuse a ``clip_low`` without effect, because ``two_sided`` is not set."""
        if not self.two_sided:
            refuse_idle(self, "clip_low", "two_sided = true")
        return self

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −log π, weighted by its advantage and its clipped ratio, which carries no
        gradient. The result includes the mask of the clipped tokens."""
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp()
        low = 1 - self.clip_low if self.two_sided else 0.0
        weights_N = ratio_N.clamp(low, 1 + self.clip_high)
        return TokenLoss(tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N, clipped_N=weights_N != ratio_N)


class Topr(AnchoredLoss):
    """TOPR's loss: tokens with a positive advantage have full weight; others less if their answer has become less
    likely.

    −A·log π where A > 0; −sg(min(Π r over the sequence, 1))·A·log π elsewhere, r = π/μ.

    Source: Le Roux et al., arXiv 2503.14286, eq. 8.
    """

    kind: Literal["topr"] = "topr"
    """The name that selects this loss."""
    anchor: Anchor = "mu"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −log π, weighted by its advantage and, where the advantage is not positive,
        by the ratio of the whole sequence, which is at most 1 and carries no gradient."""
        log_w_S = inputs.sum_S(inputs.log_ratio_N(self.anchor).detach())
        taper_N = log_w_S.clamp(-20.0, 0.0).exp()[inputs.samples_N]
        weights_N = taper_N.masked_fill(inputs.advantages_N > 0, 1.0)
        return TokenLoss(tokens_N=-weights_N * inputs.advantages_N * inputs.log_pi_N)


class Sapo(PolicyLoss):
    """SAPO's loss: a smooth gate instead of the clip, steeper where A < 0.

    −(4/τ)·σ(τ·(r − 1))·A, r = π/π_old, τ by the sign of A.

    Source: Gao et al., arXiv 2511.20347, eq. 5 and 6.
    """

    kind: Literal["sapo"] = "sapo"
    """The name that selects this loss."""
    tau_pos: float = Field(default=1.0, gt=0)
    """τ where A > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """τ where A ≤ 0."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: its advantage times a smooth gate of its ratio π/π_old, negated."""
        tau_N = inputs.advantages_N.new_full((), self.tau_pos).where(inputs.advantages_N > 0, self.tau_neg)
        gate_N = (tau_N * (inputs.log_ratio_N().exp() - 1)).sigmoid() * 4 / tau_N
        return TokenLoss(tokens_N=-gate_N * inputs.advantages_N)


class Vespo(AnchoredLoss):
    """VESPO's loss: a smooth weight that depends on the whole sequence's ratio and decreases on both sides of 1.

    −sg(φ(W))·A·log π, φ(W) = W^k·e^{λ(1−W)}, W = Π r over the sequence, r = π/μ; k and λ by the sign of A.

    Source: VESPO, arXiv 2602.10693.
    """

    kind: Literal["vespo"] = "vespo"
    """The name that selects this loss."""
    anchor: Anchor = "mu"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""
    k_pos: float = Field(default=2.0, ge=0)
    """k where A ≥ 0."""
    lambda_pos: float = Field(default=3.0, ge=0)
    """λ where A ≥ 0."""
    k_neg: float = Field(default=3.0, ge=0)
    """k where A < 0."""
    lambda_neg: float = Field(default=2.0, ge=0)
    """λ where A < 0."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −log π, weighted by its advantage and a smooth function of its sequence's
        ratio, which carries no gradient."""
        log_w_S = inputs.sum_S(inputs.log_ratio_N(self.anchor).detach()).clamp(-20.0, 20.0)
        log_w_N = log_w_S[inputs.samples_N]
        up_N = inputs.advantages_N >= 0
        rise_N = self.k_pos * log_w_N + self.lambda_pos * (1 - log_w_N.exp())
        fall_N = self.k_neg * log_w_N + self.lambda_neg * (1 - log_w_N.exp())
        return TokenLoss(tokens_N=-rise_N.where(up_N, fall_N).exp() * inputs.advantages_N * inputs.log_pi_N)


class Kimi(PolicyLoss):
    """The loss of Kimi k1.5: a plain policy gradient, with a penalty on the squared log-ratio to π_old.

    −A·log π + τ/2·(log r)², r = π/π_old; in a run the penalty has no effect unless ``algo.old = "engine"`` (π_old = μ).

    Source: Kimi k1.5, arXiv 2501.12599, eq. 3.
    """

    kind: Literal["kimi"] = "kimi"
    """The name that selects this loss."""
    tau: float = Field(default=0.1, ge=0)
    """τ, the weight of the penalty."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −A·log π plus the weighted square of log π/π_old."""
        return TokenLoss(tokens_N=-inputs.advantages_N * inputs.log_pi_N + self.tau / 2 * inputs.log_ratio_N().square())


class Dro(PolicyLoss):
    """The loss of DRO: direct reward optimisation with a quadratic penalty on the distance to π_old.

    −(A·log π − β/2·(log r)²), r = π/π_old; in a run the penalty has no effect unless ``algo.old = "engine"`` (π_old =
    μ).

    Source: Richemond et al., arXiv 2405.19107, eq. 6, with the group's baseline instead of the value function.
    """

    kind: Literal["dro"] = "dro"
    """The name that selects this loss."""
    beta: float = Field(default=0.05, ge=0)
    """β, the weight of the penalty."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −A·log π plus the weighted square of log π/π_old."""
        penalty_N = self.beta / 2 * inputs.log_ratio_N().square()
        return TokenLoss(tokens_N=penalty_N - inputs.advantages_N * inputs.log_pi_N)


class Dppo(AnchoredLoss):
    """DPPO's loss: its trust region bounds the change of a token's probability instead of the ratio.

    −keep·A·sg(min(r, c))·log π + τ·(log π/μ)²; keep is 0 where A > 0 and π − μ > δ, or A < 0 and π − μ < −δ.

    The penalty applies to every token, also to a token whose gain is dropped. With ``kl_tau = 1e-3``, ``anchor = "mu"``
    and a ``ratio_cap`` that never acts (1e9: log r is at most 20), its gradient is that of PRIME-RL's default loss.

    Source: "Rethinking the trust region in LLM reinforcement learning", arXiv 2602.04879 (total-variation form); the
    penalty: Kimi K2.5, arXiv 2602.02276, as implemented in PRIME-RL.
    """

    kind: Literal["dppo"] = "dppo"
    """The name that selects this loss."""
    anchor: Anchor = "old"
    """The policy in the denominator of r: π_old (``"old"``) or μ (``"mu"``)."""
    delta: float = Field(default=0.2, ge=0, le=1)
    """δ, the largest change of a token's probability from μ."""
    ratio_cap: float = Field(default=20.0, gt=0)
    """c, the largest weight of a token."""
    kl_tau: float = Field(default=0.0, ge=0)
    """τ, the weight of the penalty; 1e-3 is PRIME-RL's value."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: the column of the anchor, and log μ for the trust region."""
        return super().formula_columns() | {"log_mu"}

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token as a sum of two terms. The first is −log π, weighted by its advantage and its
        ratio, but 0 where its probability has moved from μ by more than δ in the direction of the advantage. The second
        is the weighted square of log π/μ. The result includes the mask of the tokens whose first term is 0."""
        moved_N = inputs.log_pi_N.detach().exp() - inputs.log_mu_N.exp()
        up_N, down_N = inputs.advantages_N > 0, inputs.advantages_N < 0
        cut_N = (up_N & (moved_N > self.delta)) | (down_N & (moved_N < -self.delta))
        ratio_N = inputs.log_ratio_N(self.anchor).detach().exp().clamp(max=self.ratio_cap)
        tokens_N = (-inputs.advantages_N * ratio_N * inputs.log_pi_N).masked_fill(cut_N, 0.0)
        if self.kl_tau > 0:
            tokens_N = tokens_N + self.kl_tau * inputs.log_ratio_N("mu").square()
        return TokenLoss(tokens_N=tokens_N, clipped_N=cut_N)


class Ipo(PolicyLoss):
    """IPO, one of PRIME-RL's losses: an importance ratio inside a band of probability, and a quadratic penalty on
    the distance to μ.

    −keep·A·r + τ·(log r)², r = π/μ, keep where |π − μ| ≤ δ.

    Source: PRIME-RL's loss of type "ipo" (its default is ``dppo`` with ``kl_tau``); the trust region of
    arXiv 2602.04879, on both sides, whatever the sign of A.
    """

    kind: Literal["ipo"] = "ipo"
    """The name that selects this loss."""
    delta: float = Field(default=0.1, ge=0, le=1)
    """δ, the largest change of a token's probability from μ."""
    tau: float = Field(default=1e-3, ge=0)
    """τ, the weight of the penalty."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the column that the formula reads: log μ."""
        return frozenset({"log_mu"})

    def corrects(self) -> bool:
        """Return ``True``: the ratio of this loss is relative to μ."""
        return True

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: −A·π/μ, or 0 where its probability has moved from μ by more than δ, plus the
        weighted square of log π/μ. The result includes the mask of the tokens whose first term is 0."""
        log_r_N = inputs.log_ratio_N("mu")
        moved_N = inputs.log_pi_N.detach().exp() - inputs.log_mu_N.exp()
        cut_N = moved_N.abs() > self.delta
        gain_N = (inputs.advantages_N * log_r_N.exp()).masked_fill(cut_N, 0.0)
        return TokenLoss(tokens_N=self.tau * log_r_N.square() - gain_N, clipped_N=cut_N)
