"""The interfaces of losses, corrections and reductions, and their inputs and results.

    advantages      rewards of groups ──▶ one number per episode                 (numpy, in the controller)
    reduction       masks of the whole batch ──▶ one weight per token            (torch, once per step)
    loss            a micro-batch's columns ──▶ one value per token
    correction      a micro-batch's columns ──▶ one factor per token, without gradient
    objective       Σ weight · (factor · value + penalty)                        a sum: exact for any micro-batching

All normalisation is in the weights of the reduction, which are computed from the masks of the whole batch before the
first forward pass. The objective of a batch is therefore a plain sum over its tokens. Its value and gradient do not
depend on how the batch is divided, packed or distributed over ranks. A formula that needs a statistic of the whole
batch (the largest ratios, the largest covariances) computes it beforehand, as the additional column ``selected_NP``.

Formulas are written with methods of tensors, so that this package can be imported and configured without torch.

Shape legend: N tokens of all samples, concatenated; S samples; P formulas that select tokens; K vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Column = Literal["log_old", "log_mu", "log_ref", "entropy", "versions", "selected", "pairs", "top_k", "baseline"]
"""A column that a formula may read beyond log π, advantages and mask."""

Anchor = Literal["old", "mu"]
"""The policy in the denominator of a ratio: π_old, or μ, which sampled the token."""

Old = Literal["learner", "engine", "kept", "sampled"]
"""The policy that is π_old in a run: the learner's weights before this step's update, μ, which sampled the token,
weights that the learner has kept, or the learner's weights of the version that sampled the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of losses and corrections: the token-aligned columns of whole samples, one after the other. Values
    outside the mask have no effect."""

    log_pi_N: Tensor
    """log π under the weights that are being trained; carries the gradient."""
    log_old_N: Tensor
    """log π_old, without gradient: of the learner's weights before this step's update, of μ if ``algo.old =
    "engine"``, of kept weights if it is ``"kept"``, or of each token's own version if it is ``"sampled"``."""
    log_mu_N: Tensor
    """log μ as the engine recorded it, without gradient."""
    advantages_N: Tensor
    """The advantage of each token."""
    mask_N: Tensor
    """bool; whether each token carries loss."""
    samples_N: Tensor
    """int64; the index of each token's sample, from 0. Sequence-level formulas sum over samples."""
    num_samples: int
    """The number of samples S."""
    versions_N: Tensor
    """int64; the version that sampled each token, −1 for a token that was not sampled."""
    version_now: int
    """The learner's version: the age of a token is ``version_now − version``."""
    log_ref_N: Tensor | None = None
    """log π_ref of a reference policy, without gradient; ``None`` if the objective does not read it."""
    entropy_N: Tensor | None = None
    """The entropy of π at each token; ``None`` if the objective does not read it. It carries the gradient for an
    entropy bonus."""
    selected_NP: Tensor | None = None
    """bool; the tokens that each formula has selected from the whole batch: the rows of the result of
    ``Objective.prepare`` for the tokens of this micro-batch."""
    groups_S: Tensor | None = None
    """int64; the group of each sample, for losses over pairs. Both samples of a pair are in the same micro-batch."""
    baseline: Tensor | None = None
    """A scalar: KL(π‖π_ref) per sample, estimated from answers to other prompts; ``None`` if the objective does not
    read it."""
    log_pi_NK: Tensor | None = None
    """log π of the K entries that are likeliest under a teacher, with gradient; ``None`` if the objective does not read
    it."""
    log_nu_NK: Tensor | None = None
    """log ν of the same entries under the teacher, without gradient; ``None`` if the objective does not read it."""

    def ages_N(self) -> Tensor:
        """Return the age of each token in versions; undefined for tokens outside the mask."""
        return self.version_now - self.versions_N

    def log_ratio_N(self, anchor: Anchor = "old") -> Tensor:
        """Return log π/π_old of each token, or log π/μ if ``anchor`` is ``"mu"``, clamped to ±20, with gradient."""
        return log_ratio(self.log_pi_N, self.log_old_N if anchor == "old" else self.log_mu_N)

    def log_rho_N(self) -> Tensor:
        """Return log ρ = log π_old/μ of each token, clamped to ±20 and without gradient. Corrections compensate for the
        difference between these two policies."""
        return log_ratio(self.log_old_N, self.log_mu_N)

    def sum_S(self, values_N: Tensor) -> Tensor:
        """Return, for each sample, the sum of ``values_N`` over its tokens in the mask."""
        kept_N = values_N.masked_fill(~self.mask_N, 0.0)
        return values_N.new_zeros(self.num_samples).index_add(0, self.samples_N, kept_N)

    def mean_S(self, values_N: Tensor) -> Tensor:
        """Return, for each sample, the mean of ``values_N`` over its tokens in the mask; 0 for a sample without such
        tokens."""
        return self.sum_S(values_N) / self.sum_S(values_N.new_ones(values_N.shape)).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric as a total and a count, both of which are summed over micro-batches and ranks. Its value is NaN if the
    count is 0."""

    total: Tensor | float
    """The numerator of the metric."""
    count: Tensor | float
    """The denominator of the metric, such as the number of tokens."""

    def __float__(self) -> float:
        """Return total / count; NaN if the count is 0."""
        return float(self.total) / float(self.count) if self.count else math.nan


Metrics = Mapping[str, Ratio]
"""Metrics by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The result of a loss for a micro-batch, before any reduction."""

    tokens_N: Tensor
    """The value of each token, to be minimised; values outside the mask are ignored."""
    clipped_N: Tensor | None = None
    """bool; the tokens at a bound of the formula, whose gradient is reduced or 0; ``None`` if the formula has no
    bound."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the loss over the micro-batch, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The result of a correction for a micro-batch."""

    tokens_N: Tensor
    """The weight (or 0/1 mask) that multiplies the loss of each token, without gradient."""
    log_old_N: Tensor | None = None
    """log π_old, which replaces that of the inputs in the loss and in later corrections; ``None``: no replacement."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the correction over the micro-batch, by name."""


class TokenFormula(Protocol):
    """The common interface of losses and corrections."""

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads in addition to those that every batch has."""
        ...

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the tokens that the formula treats differently, selected by a statistic of the
        whole batch. ``whole`` has all columns of the batch. This method is called only if :meth:`columns` contains
        ``"selected"``."""
        ...


class Loss(TokenFormula, Protocol):
    """A loss: a small frozen record of settings with one formula, which returns a value for each token."""

    reduction: ClassVar[str]
    """The kind of reduction that the paper of the loss uses."""

    def corrects(self) -> bool:
        """Return whether the ratio of the loss is relative to μ, so that a correction by ρ would correct twice."""
        ...

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token of a micro-batch, before corrections and reduction."""
        ...

    def penalty(self, inputs: LossInputs) -> TokenLoss | None:
        """Return the penalty that is added to every token's value after correction; ``None`` if there is none."""
        ...


class Correction(TokenFormula, Protocol):
    """A correction for tokens that π_old did not sample. Every correction can be combined with every loss."""

    weighs: ClassVar[bool]
    """Whether the factor is a form of ρ. An objective may have only one such factor."""
    corrects: ClassVar[bool]
    """Whether the correction bounds the error of training on tokens of older weights."""
    replaces_old: ClassVar[bool]
    """Whether the correction computes π_old for the loss, so that the learner need not keep or compute it."""

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor that multiplies the loss of every token of a micro-batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The masks of a whole batch, the only inputs of a reduction."""

    mask_N: Tensor
    """bool; the loss mask without the tokens that cannot carry loss."""
    samples_N: Tensor
    """int64; the index of each token's sample, from 0."""
    episodes_S: Tensor
    """int64; the rollout of each sample. Several samples of one rollout count as one."""
    groups_S: Tensor
    """int64; the prompt of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The result of a reduction: the weights of the tokens before the division by the batch's denominator."""

    weights_N: Tensor
    """float32; the weight of each token, 0 outside the mask."""
    mass: Tensor
    """The contribution of this layout to the denominator. The contributions of parts that consist of whole groups sum
    to that of the batch."""


class Reduction(Protocol):
    """A rule that combines the losses of all tokens into one number: Σ weight · token / Σ mass."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight of every token of a batch, or of a part that consists of whole groups, and the contribution
        to the denominator."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The objective of a micro-batch: its part of the batch's loss."""

    loss: Tensor
    """A scalar with gradient; the values of all micro-batches sum to the batch's loss."""
    tokens: Tensor
    """The corrected loss of each token, in the shape of the inputs, without gradient; 0 outside the mask."""
    metrics: dict[str, Ratio]
    """The metrics of the loss, the corrections and the tokens, by name."""


def to_tensor(name: str, value: Any) -> Tensor:
    """Return ``value`` (a tensor, an array, lists of numbers) as a tensor. Raises :class:`ConfigError`, which contains
    ``name``, for any other value."""
    import torch

    if value is None:
        raise ConfigError(f"{name} is missing", remedy=f"give {name}")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        words = str(error).splitlines()[0]
        raise ConfigError(f"{name} is not a table of numbers: {words}", remedy=f"give {name} as a tensor") from None


def log_ratio(log_p: Tensor, log_q: Tensor, limit: float = 20.0) -> Tensor:
    """Return log(p/q) of each element for the log-probabilities ``log_p`` and ``log_q``, clamped to ±``limit`` so that
    its exponential is finite.

    >>> import torch
    >>> log_ratio(torch.tensor([0.0]), torch.tensor([-100.0]))
    tensor([20.])
    """
    return (log_p - log_q).clamp(-limit, limit)
