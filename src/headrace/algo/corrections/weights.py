"""Corrections that multiply each token's loss by a truncated ratio, without gradient.

A correction is a record of settings (``[[algo.correction]]``). It is called with the columns of a micro-batch. π is the
policy in training, μ the policy that sampled the token, ρ = π_old/μ; ``log_rho_N`` is log ρ. N tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs, log_ratio
from headrace.algo.corrections.section import CorrectionSection, compute_log_rho


class Tis(CorrectionSection):
    """Truncated importance sampling, token by token.

    min(ρ, C), ρ = π_old/μ per token.

    Source: Ionides (2008), "Truncated importance sampling"; Yao et al. (2025), "Your efficient RL framework secretly
    brings you off-policy RL training".
    """

    kind: Literal["tis"] = "tis"
    """The name that selects this correction."""
    cap: float = Field(default=2.0, gt=0)
    """C, the largest weight of a token."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: its ratio ρ = π_old/μ, at most ``cap``."""
        return Factor(tokens_N=inputs.log_rho_N().exp().clamp(max=self.cap))


class SequenceTis(CorrectionSection):
    """Truncated importance sampling with one weight per sequence.

    min(w, C), w = Πρ over the sequence, or its geometric mean (Πρ)^{1/T}; ρ = π_old/μ.

    A product over a long answer is far from 1 even for a small mismatch; the geometric mean does not depend on length.
    Source: Liu et al. (2025), "When speed kills stability"; geometric form: Zheng et al., arXiv 2507.18071, eq. 7.
    """

    kind: Literal["sequence_tis"] = "sequence_tis"
    """The name that selects this correction."""
    level: Literal["sequence", "geometric"] = "sequence"
    """The weight of a sequence: ``"sequence"`` for the product, ``"geometric"`` for the geometric mean."""
    cap: float = Field(default=2.0, gt=0)
    """C, the largest weight of a sequence."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token, which is the same for all tokens of a sequence: the product or the
        geometric mean of the ratios ρ, at most ``cap``."""
        return Factor(tokens_N=compute_log_rho(self.level, inputs).exp().clamp(max=self.cap))


class Decoupled(CorrectionSection):
    """Decoupled PPO: the loss clips against a recent policy, and this weight corrects for the policy that sampled.

    min(ρ, C), ρ = π_old/μ per token: tis with a larger bound, for a loss that clips π/π_old.

    In a run π_old is the learner before this step. If a batch is one update, the ratio that the loss clips is then 1,
    and only the weight acts. With ``loglinear``, π_old is between μ and π, and with ``algo.old = "engine"`` it is μ:
    the clips act then.

    Source: Hilton et al., arXiv 2110.00641, eq. 5; for language models: AReaL, arXiv 2505.24298, eq. 5.
    """

    kind: Literal["decoupled"] = "decoupled"
    """The name that selects this correction."""
    cap: float = Field(default=5.0, gt=0)
    """C, the largest weight of a token."""
    weighs: ClassVar[bool] = True

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: its ratio ρ = π_old/μ, at most ``cap``."""
        return Factor(tokens_N=inputs.log_rho_N().exp().clamp(max=self.cap))


class Loglinear(CorrectionSection):
    """A-3PO: a proximal policy interpolated between μ and π by each token's age, without a forward pass.

    log π_old := log μ + α·(log π − log μ), α = (age − 1)/age for age ≥ 1, else 0; weight min(π_old/μ, C).

    With v_prox = v_now − 1 this is α = (v_prox − v_token)/(v_now − v_token). The loss clips against this π_old.
    Source: A-3PO, arXiv 2512.06547, eq. 4 and 5.
    """

    kind: Literal["loglinear"] = "loglinear"
    """The name that selects this correction."""
    cap: float = Field(default=5.0, gt=0)
    """C, the largest weight of a token."""
    weighs: ClassVar[bool] = True
    replaces_old: ClassVar[bool] = True

    def columns(self) -> frozenset[Column]:
        """Return the columns that the correction reads: log μ and versions."""
        return frozenset({"log_mu", "versions"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token, π_old/μ but at most ``cap``, and the interpolated log π_old, which replaces
        that of ``inputs`` in the loss."""
        ages_N = inputs.ages_N().clamp(min=1).to(inputs.log_pi_N.dtype)
        step_N = (ages_N - 1) / ages_N * log_ratio(inputs.log_pi_N.detach(), inputs.log_mu_N)
        return Factor(tokens_N=step_N.exp().clamp(max=self.cap), log_old_N=inputs.log_mu_N + step_N)
