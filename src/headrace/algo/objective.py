"""The objective of an optimizer step: weight · (factor · loss + penalty), summed over tokens.

    once per batch          mask, dropped = usable(mask, log μ) ─▶ weights(layout) ─▶ prepare(whole), if it selects
    every micro-batch       objective(inputs, weights) ─▶ .loss.backward()
    once per batch          add(metrics of all micro-batches) ─▶ means

The losses of the micro-batches sum to the batch's loss, so that gradients are summed, and not averaged, over
micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.algo.advantages import GaeAdvantage
from headrace.algo.advantages.tokens import ReverseKl
from headrace.algo.base import (
    BatchLayout,
    Column,
    Correction,
    Loss,
    LossInputs,
    LossOutput,
    Old,
    Ratio,
    Reduction,
    Shares,
    TokenFormula,
)
from headrace.algo.config import AlgoConfig
from headrace.algo.metrics import average_by_age, kl_ref, off_policy
from headrace.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a learner's step: a loss, the corrections that multiply it, and the reduction that weighs its
    tokens. It is called with each micro-batch."""

    loss: Loss
    """The formula of each token's value."""
    corrections: tuple[Correction, ...]
    """The formulas of factors, in the order in which they are applied."""
    reduction: Reduction
    """The rule that determines the tokens' weights."""
    old: Old = "learner"
    """The policy whose log-probabilities are the column log π_old in a run."""
    critic: GaeAdvantage | None = None
    """The advantage that is computed from a critic's values; ``None`` if the batch contains the advantages."""
    teaching: ReverseKl | None = None
    """The advantage that adds a teacher's scores to the advantages of the batch; ``None`` if there is none."""
    epochs: int = 1
    """The number of passes over a batch."""
    minibatches: int = 1
    """The number of updates in each pass."""

    @classmethod
    def build(cls, config: AlgoConfig) -> Objective:
        """Return the objective that ``config``, the settings ``[algo]``, describes."""
        critic = config.advantage if isinstance(config.advantage, GaeAdvantage) else None
        teaching = config.advantage if isinstance(config.advantage, ReverseKl) else None
        return cls(
            config.loss,
            config.correction,
            config.reduction,
            config.old,
            critic,
            teaching,
            epochs=config.epochs,
            minibatches=config.minibatches,
        )

    @property
    def num_updates(self) -> int:
        """Return the number of optimizer updates per batch."""
        return self.epochs * self.minibatches

    @property
    def parts(self) -> tuple[TokenFormula, ...]:
        """Return the loss and its corrections, in this order."""
        return (self.loss, *self.corrections)

    @property
    def columns(self) -> frozenset[Column]:
        """Return the columns that the objective reads in addition to those that every batch has. The learner must
        compute them."""
        computed: frozenset[Column] = (
            frozenset({"log_old"}) if any(part.replaces_old for part in self.corrections) else frozenset()
        )
        return (self.loss.columns() - computed).union(*(part.columns() for part in self.corrections))

    @property
    def selects_tokens(self) -> bool:
        """Whether the loss or a correction treats some tokens differently and selects them by a statistic of the whole
        batch. If so, the learner computes log π of the whole batch first, and then calls :meth:`prepare`."""
        return "selected" in self.columns

    def weights(self, layout: BatchLayout) -> Tensor:
        """Return the weight of every token of a whole batch, described by ``layout``, in the loss (N, float32): the
        weight of the reduction divided by the denominator of the batch; 0 outside the mask."""
        shares = self.shares(layout)
        return shares.weights_N / shares.mass.clamp(min=1.0)

    def shares(self, layout: BatchLayout) -> Shares:
        """Return the weights of the tokens of ``layout``, a part of a batch that is not complete yet. The part must
        contain whole groups. Accumulate gradients with ``weights_N`` and the mass of every part, then divide the
        gradients by the sum of the masses."""
        return self.reduction(layout)

    def prepare(self, whole: LossInputs) -> Tensor | None:
        """Return the tokens that each formula selects from the whole batch (N×P, bool); ``None`` if no formula selects
        tokens. Each micro-batch receives its own rows of the result as ``selected_NP``. ``whole`` contains log π under
        the present weights in ``log_pi_N``.
        """
        if not self.selects_tokens:
            return None
        whole = _clean(whole)
        for correction in self.corrections:
            if correction.replaces_old:
                log_old_N = correction(whole).log_old_N
                assert log_old_N is not None
                whole = replace(whole, log_old_N=log_old_N)
        selected = [part.select(whole) & whole.mask_N for part in self.parts if "selected" in part.columns()]
        return torch.stack(selected, dim=1)

    def __call__(self, inputs: LossInputs, weights_N: Tensor) -> LossOutput:
        """Return the part of the batch's loss that comes from one micro-batch, with gradient, and its metrics.
        ``weights_N`` are the weights of its tokens, from :meth:`weights`. Raises
        :class:`~headrace.base.errors.ConfigError` if a column that a formula reads is missing."""
        self._check(inputs)
        inputs = _clean(inputs)
        log_learner_N = inputs.log_old_N if self.old == "learner" else inputs.log_pi_N.detach()
        metrics = off_policy(inputs, log_learner_N)
        if inputs.log_ref_N is not None:
            metrics["kl_ref"] = kl_ref(inputs.log_pi_N.detach(), inputs.log_ref_N, inputs.mask_N)
        factor_N = inputs.log_pi_N.new_ones(len(inputs.mask_N))
        for correction in self.corrections:
            factor = correction(self._make_inputs(correction, inputs))
            factor_N = factor_N * factor.tokens_N.detach()
            metrics.update(factor.metrics)
            if factor.log_old_N is not None:
                inputs = replace(inputs, log_old_N=factor.log_old_N.detach())
        loss = self.loss(self._make_inputs(self.loss, inputs))
        tokens_N = factor_N * loss.tokens_N
        metrics.update(loss.metrics)
        if (penalty := self.loss.penalty(inputs)) is not None:
            tokens_N = tokens_N + penalty.tokens_N
            metrics.update(penalty.metrics)
        tokens_N = tokens_N.masked_fill(~inputs.mask_N, 0.0)
        self._measure(inputs, factor_N, loss.clipped_N, metrics)
        return LossOutput(loss=(weights_N * tokens_N).sum(), tokens=tokens_N.detach(), metrics=metrics)

    def _make_inputs(self, part: TokenFormula, inputs: LossInputs) -> LossInputs:
        """Return the inputs for the formula ``part``. If it selects tokens, ``selected_NP`` contains only its own
        selection."""
        if "selected" not in part.columns():
            return inputs
        assert inputs.selected_NP is not None
        index = [p for p in self.parts if "selected" in p.columns()].index(part)
        return replace(inputs, selected_NP=inputs.selected_NP[:, index : index + 1])

    def _check(self, inputs: LossInputs) -> None:
        """Raise :class:`~headrace.base.errors.ConfigError` if a column that a formula reads is ``None``."""
        optional = {
            "log_ref": inputs.log_ref_N, "entropy": inputs.entropy_N, "selected": inputs.selected_NP,
            "pairs": inputs.groups_S, "top_k": inputs.log_nu_NK, "baseline": inputs.baseline,
        }  # fmt: skip
        for name in sorted(self.columns):
            if name in optional and optional[name] is None:
                raise ConfigError(f"the objective reads {name!r}, which is missing", remedy=_SOURCES[name])

    def _measure(
        self, inputs: LossInputs, factor_N: Tensor, clipped_N: Tensor | None, metrics: dict[str, Ratio]
    ) -> None:
        """Add to ``metrics``, for the micro-batch ``inputs``: the mean factor of the corrections and the fraction of
        tokens that they reject, the fraction of clipped tokens by age, and the mean entropy, as far as they exist.
        ``factor_N`` is the product of the corrections' factors. ``clipped_N`` is the loss's mask of clipped tokens, or
        ``None`` if the loss has no bound."""
        count = inputs.mask_N.sum()
        if self.corrections:
            kept_N = factor_N.masked_fill(~inputs.mask_N, 0.0)
            metrics["correction_weight"] = Ratio(kept_N.sum(), count)
            metrics["correction_rejected"] = Ratio(count - (kept_N > 0).sum(), count)
        if clipped_N is not None:
            metrics.update(average_by_age("clip_frac", clipped_N, inputs))
        if inputs.entropy_N is not None:
            metrics["entropy"] = Ratio(inputs.entropy_N.detach().sum(), count)


# the remedy for each missing column
_SOURCES: dict[str, str] = {
    "log_ref": "give log_ref: log-probabilities of a reference policy",
    "entropy": "give the entropy of every token",
    "selected": "call prepare on the whole batch first and give its rows as selected_NP",
    "baseline": "give the divergence from the reference as baseline",
    "pairs": "give the group of every sample as groups_S",
    "top_k": "give log π and log ν of the teacher's likeliest entries",
}


_COLUMNS = (
    "log_pi_N", "log_old_N", "log_mu_N", "advantages_N", "log_ref_N", "entropy_N", "log_pi_NK", "log_nu_NK"
)  # fmt: skip
"""The floating-point columns of :class:`LossInputs` with one entry per token."""


def usable(mask_N: Tensor, log_mu_N: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mask ``mask_N`` without tokens that cannot carry loss, and the number of dropped tokens by reason, as
    tensors, to avoid waiting for the device.

    A token whose log μ, ``log_mu_N``, is not finite is excluded from the numerator and from the denominator of the
    loss. For this, call the function before :meth:`Objective.weights`.
    """
    finite_N = log_mu_N.isfinite()
    return mask_N & finite_N, {"nonfinite_logprob": (mask_N & ~finite_N).sum()}


def _clean(inputs: LossInputs) -> LossInputs:
    """Return the inputs with every floating-point column in at least float32 and with 0 outside the mask, so that
    values outside the mask, such as NaN, have no effect."""
    outside_N = ~inputs.mask_N

    def column(x_N: Tensor | None) -> Tensor | None:
        """Return the column ``x_N`` in at least float32, with 0 for tokens outside the mask; ``None`` if the column is
        missing."""
        if x_N is None:
            return None
        wide = x_N if x_N.element_size() >= 4 else x_N.float()
        return wide.masked_fill(outside_N if wide.ndim == 1 else outside_N[:, None], 0.0)

    columns: dict[str, Any] = {name: column(getattr(inputs, name)) for name in _COLUMNS}
    return replace(inputs, **columns)
