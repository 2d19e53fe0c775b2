"""Distillation from a teacher's K likeliest entries, what remains being one more entry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Column, LossInputs, TokenLoss
from headrace.algo.losses.section import LossSection, refuse_idle

if TYPE_CHECKING:
    from torch import Tensor


class Distill(LossSection):
    """D(ν, π) over the teacher's top K and the tail: forward Σ ν·log(ν/π), reverse Σ π·log(π/ν), or
    jsd β·KL(ν‖m) + (1−β)·KL(π‖m) with m = β·ν + (1−β)·π. Advantages are not looked at.

    Source: Agarwal et al. (GKD), arXiv 2306.13649, eq. 1–3; the tail keeps both sides probability distributions.
    """

    kind: Literal["distill"] = "distill"
    """Selects this loss."""
    divergence: Literal["forward", "reverse", "jsd"] = "reverse"
    """Which way the difference is measured: forward covers the teacher's modes, reverse seeks one."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """β: weight of the teacher in the mixture; used only by ``jsd``."""

    @pydantic.model_validator(mode="after")
    def _mixture_is_used(self) -> Distill:
        if self.divergence != "jsd":
            refuse_idle(self, "beta", 'divergence = "jsd"')
        return self

    def columns(self) -> frozenset[Column]:
        """Both distributions over the teacher's likeliest entries."""
        return frozenset({"top_k"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.log_pi_NK is not None
        assert inputs.log_nu_NK is not None
        log_pi_NK, log_nu_NK = with_tail(inputs.log_pi_NK), with_tail(inputs.log_nu_NK)
        match self.divergence:
            case "forward":
                return TokenLoss(tokens_N=kl_over(log_nu_NK, log_pi_NK))
            case "reverse":
                return TokenLoss(tokens_N=kl_over(log_pi_NK, log_nu_NK))
            case "jsd":
                mixed_NK = (log_nu_NK + math.log(self.beta)).logaddexp(log_pi_NK + math.log1p(-self.beta))
                toward_N, back_N = kl_over(log_nu_NK, mixed_NK), kl_over(log_pi_NK, mixed_NK)
                return TokenLoss(tokens_N=self.beta * toward_N + (1 - self.beta) * back_N)


def with_tail(log_p_NK: Tensor) -> Tensor:
    """Log-probabilities with that of everything else as one more entry; none below e⁻⁶⁰, the tail not below 1e-7."""
    mass_N = log_p_NK.exp().sum(dim=1, keepdim=True).clamp(max=1 - 1e-7)
    tail_N = (-mass_N).log1p()
    wide = log_p_NK.new_empty((log_p_NK.shape[0], log_p_NK.shape[1] + 1))
    wide = wide.slice_scatter(log_p_NK.clamp(min=-60.0), dim=1, end=-1)
    return wide.slice_scatter(tail_N, dim=1, start=-1)


def kl_over(log_p_NK: Tensor, log_q_NK: Tensor) -> Tensor:
    """KL(p‖q) of every row."""
    return (log_p_NK.exp() * (log_p_NK - log_q_NK)).sum(dim=1)
