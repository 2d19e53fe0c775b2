"""The base classes of losses: the defaults of the contract, the KL and entropy terms, the anchor.

A loss is called with the columns of a micro-batch and returns one value per token. π is the policy in training, μ the
policy that sampled the token, π_ref a reference. The *anchor* is the policy in the denominator of a loss's ratio, π_old
or μ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pydantic
from pydantic import Field

from headrace.algo.base import Anchor, Column, LossInputs, Ratio, TokenLoss
from headrace.algo.divergence import Estimator, estimate
from headrace.base.config import Section
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def refuse_idle(section: Section, key: str, needed: str) -> None:
    """Raise :class:`ConfigError` if the setting ``key`` of ``section`` differs from its default although it has no
    effect, because the condition ``needed`` is not satisfied."""
    value: object = section.model_dump()[key]
    if value != type(section).model_fields[key].default:
        raise ConfigError(
            f"loss.{key}={value!r} has no effect without {needed}", remedy=f"set {needed}, or leave {key} out"
        )


class LossSection(Section):
    """The base class of the settings of a loss. Its methods describe a loss that reads only log π, corrects nothing and
    adds no penalty. ``reduction`` is the kind of the reduction that is used unless another one is set."""

    reduction: ClassVar[str] = "token_mean"

    def columns(self) -> frozenset[Column]:
        """Return the columns that the loss reads in addition to those that every batch has; none by default."""
        return frozenset()

    def corrects(self) -> bool:
        """Return whether the loss's own ratio is relative to μ, the policy that sampled, so that it needs no
        correction; ``False`` by default."""
        return False

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens selected from the whole batch. A loss with ``"selected"`` among its
        columns overrides this method. Raises ``NotImplementedError`` otherwise, where it is never called."""
        raise NotImplementedError(f"{type(self).__name__} selects no tokens")

    def penalty(self, inputs: LossInputs) -> TokenLoss | None:
        """Return the penalty that is added to every token's value after correction; ``None`` (no penalty) by
        default."""
        return None


class PolicyLoss(LossSection):
    """A loss of policy optimisation: a formula in the ratio π/π_old, and two optional terms."""

    kl_coef: float = Field(default=0.0, ge=0)
    """The weight of KL(π‖π_ref), which is added to every token; 0 needs no reference policy."""
    kl: Estimator = "k3"
    """The estimator of that KL; it may be set only with ``kl_coef`` above 0: k1 = −x, k2 = x²/2, k3 = eˣ−1−x, with
    x = log π_ref − log π."""
    unbiased_kl: bool = False
    """Whether to multiply the estimator by π/π_old, which makes its gradient unbiased (DeepSeek-V3.2, eq. 7). It may be
    set only with ``kl_coef`` above 0."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """The weight of an entropy bonus, which is subtracted from every token; 0 needs no entropies."""

    @pydantic.model_validator(mode="after")
    def _terms_are_on(self) -> PolicyLoss:
        """Refuse options of the KL penalty while its coefficient is 0."""
        if self.kl_coef == 0:
            refuse_idle(self, "kl", "kl_coef > 0")
            refuse_idle(self, "unbiased_kl", "kl_coef > 0")
        return self

    def formula_columns(self) -> frozenset[Column]:
        """Return the columns that the formula itself reads, without the columns of the KL penalty and of the entropy
        bonus; log π_old by default."""
        return frozenset({"log_old"})

    def columns(self) -> frozenset[Column]:
        """Return the columns of the formula, and those of the KL penalty and of the entropy bonus if their coefficients
        are above 0."""
        columns = set(self.formula_columns())
        if self.kl_coef > 0:
            columns |= {"log_ref", "log_old"} if self.unbiased_kl else {"log_ref"}
        if self.entropy_coef > 0:
            columns.add("entropy")
        return frozenset(columns)

    def penalty(self, inputs: LossInputs) -> TokenLoss | None:
        """Return kl_coef · KL(π‖π_ref) − entropy_coef · H(π) of every token of ``inputs``, with the metric ``kl_ref``;
        ``None`` if both coefficients are 0."""
        terms: list[Tensor] = []
        metrics: dict[str, Ratio] = {}
        count = inputs.mask_N.sum()
        if self.kl_coef > 0:
            assert inputs.log_ref_N is not None
            kl_N = estimate(self.kl, inputs.log_pi_N, inputs.log_ref_N)
            if self.unbiased_kl:
                kl_N = inputs.log_ratio_N().exp() * kl_N
            metrics["kl_ref"] = Ratio(kl_N.detach().masked_fill(~inputs.mask_N, 0.0).sum(), count)
            terms.append(self.kl_coef * kl_N)
        if self.entropy_coef > 0:
            assert inputs.entropy_N is not None
            terms.append(-self.entropy_coef * inputs.entropy_N)
        if not terms:
            return None
        return TokenLoss(tokens_N=terms[0] if len(terms) == 1 else terms[0] + terms[1], metrics=metrics)


class AnchoredLoss(PolicyLoss):
    """The base class of losses whose ratio is relative to π_old or to μ, by choice."""

    anchor: Anchor = "old"
    """The policy in the denominator of the ratio. ``"old"``: r = π/π_old, and a correction accounts for π_old/μ.
    ``"mu"``: r = π/μ, so that no correction is needed."""

    def formula_columns(self) -> frozenset[Column]:
        """Return the column of the policy in the denominator of the ratio: log π_old or log μ."""
        return frozenset({"log_old"}) if self.anchor == "old" else frozenset({"log_mu"})

    def corrects(self) -> bool:
        """Return whether the ratio is relative to μ, so that no correction is needed."""
        return self.anchor == "mu"
