"""The divergence from a reference policy as the whole loss."""

from __future__ import annotations

from typing import Literal

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.divergence import Estimator, estimate
from headrace.algo.losses.section import LossSection


class RefKl(LossSection):
    """KL(π‖π_ref) by k1 = −x, k2 = x²/2 or k3 = eˣ−1−x, x = log π_ref − log π. Advantages are not looked at.

    Source: Schulman (2020), "Approximating KL divergence"; unbiased form: DeepSeek-V3.2, eq. 7.
    """

    kind: Literal["ref_kl"] = "ref_kl"
    """Selects this loss."""
    kl: Estimator = "k3"
    """The estimator; on samples of π, ``k2`` has the gradient of the divergence itself."""
    unbiased_kl: bool = False
    """Multiply by π/π_old, which makes the gradient unbiased."""

    def columns(self) -> frozenset[Column]:
        """The reference, and π_old for the ratio."""
        return frozenset({"log_ref", "log_old"}) if self.unbiased_kl else frozenset({"log_ref"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.log_ref_N is not None
        tokens_N = estimate(self.kl, inputs.log_pi_N, inputs.log_ref_N)
        return TokenLoss(tokens_N=inputs.log_ratio_N().exp() * tokens_N if self.unbiased_kl else tokens_N)
