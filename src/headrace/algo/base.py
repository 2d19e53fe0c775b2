"""What a loss, a correction, a reduction and an advantage are.

    advantages      rewards of groups ──▶ one number per episode                 (numpy, in the controller)
    reduction       masks of the whole batch ──▶ one weight per token            (torch, once per step)
    loss            a micro-batch's columns ──▶ one value per token
    correction      a micro-batch's columns ──▶ one factor per token, without gradient
    objective       Σ weight · (factor · value + penalty)                        a sum: exact for any micro-batching

Every normalisation lies in the reduction's weights, and they are made from the masks of the whole batch before the
first forward pass. So the objective of a batch is a plain sum over its tokens, and its value and gradient do not depend
on how the batch is cut, packed or spread over ranks. A formula that needs a statistic of the whole batch (the largest
ratios, the largest covariances) makes it beforehand, as one more column: ``selected_NP``.

Formulas are written as methods of tensors, so that this folder can be read, configured and checked without torch.

Shape legend: N tokens of the samples one after the other; S samples; P parts that select tokens; K vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Column = Literal["log_old", "log_mu", "log_ref", "entropy", "versions", "selected", "pairs", "top_k"]
"""What a formula may read beyond log π, advantages and mask."""

Anchor = Literal["old", "mu"]
"""The policy that a ratio is taken against: π_old, or what sampled the token."""

Old = Literal["learner", "engine", "kept"]
"""Who is π_old in a run: the learner before this step's update, what sampled the token, or weights that the learner has
kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Token-aligned columns of whole samples, one after the other. Values outside the mask have no influence."""

    log_pi_N: Tensor
    """log π under the weights that are being trained; carries the gradient."""
    log_old_N: Tensor
    """log π_old: the learner's weights before this step's update; μ where ``algo.old = "engine"``; kept weights where
    it is ``"kept"``; no gradient."""
    log_mu_N: Tensor
    """log μ as the engine recorded it; no gradient."""
    advantages_N: Tensor
    mask_N: Tensor
    """bool; the tokens that carry loss."""
    samples_N: Tensor
    """int64; the sample, from 0, that each token belongs to: sequence-level formulas sum over it."""
    num_samples: int
    versions_N: Tensor
    """int64; the weights that sampled each token, −1 for none."""
    version_now: int
    """The learner's version: a token's age is ``version_now − version``."""
    log_ref_N: Tensor | None = None
    """log π_ref of a reference policy, where the objective asks for one; no gradient."""
    entropy_N: Tensor | None = None
    """Entropy of π at each token, where the objective asks for it; carries the gradient if there is a bonus."""
    selected_NP: Tensor | None = None
    """bool; the tokens that each part chose from the whole batch: rows of what ``Objective.prepare`` returned."""
    groups_S: Tensor | None = None
    """int64; the group of each sample, for losses over pairs; both of a pair are in the same micro-batch."""
    log_pi_NK: Tensor | None = None
    """log π of a teacher's K likeliest entries, where the objective asks for it; carries the gradient."""
    log_nu_NK: Tensor | None = None
    """log ν of the same entries under the teacher; no gradient."""

    def ages_N(self) -> Tensor:
        """Age of each token in versions; meaningless outside the mask."""
        return self.version_now - self.versions_N

    def log_ratio_N(self, anchor: Anchor = "old") -> Tensor:
        """log π/π_old or log π/μ, clamped; carries the gradient."""
        return log_ratio(self.log_pi_N, self.log_old_N if anchor == "old" else self.log_mu_N)

    def log_rho_N(self) -> Tensor:
        """log ρ = log π_old/μ, clamped: what a correction corrects."""
        return log_ratio(self.log_old_N, self.log_mu_N)

    def sum_S(self, values_N: Tensor) -> Tensor:
        """Sum over the mask of each sample."""
        kept_N = values_N.masked_fill(~self.mask_N, 0.0)
        return values_N.new_zeros(self.num_samples).index_add(0, self.samples_N, kept_N)

    def mean_S(self, values_N: Tensor) -> Tensor:
        """Mean over the mask of each sample; 0 for a sample without one."""
        return self.sum_S(values_N) / self.sum_S(values_N.new_ones(values_N.shape)).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric that adds up exactly over micro-batches and ranks: total / count; NaN where nothing was counted."""

    total: Tensor | float
    count: Tensor | float

    def __float__(self) -> float:
        return float(self.total) / float(self.count) if self.count else math.nan


Metrics = Mapping[str, Ratio]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a loss makes of a micro-batch, before any reduction."""

    tokens_N: Tensor
    """To be minimised; anything outside the mask is ignored."""
    clipped_N: Tensor | None = None
    """bool; the tokens at a bound of the formula, which have less gradient or none; ``None`` if it has no bound."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What a correction makes of a micro-batch."""

    tokens_N: Tensor
    """Weight (or 0/1 mask) that multiplies the loss of each token; carries no gradient."""
    log_old_N: Tensor | None = None
    """log π_old that the loss and later corrections take instead; ``None`` leaves it as it is."""
    metrics: Metrics = field(default_factory=dict)


class TokenFormula(Protocol):
    """What losses and corrections have in common."""

    def columns(self) -> frozenset[Column]:
        """The columns it reads beyond the ones that are always there."""
        ...

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens (N, bool) it chooses from the whole batch; asked only of parts that read ``"selected"``."""
        ...


class Loss(TokenFormula, Protocol):
    """A loss: a small frozen config with one formula."""

    reduction: ClassVar[str]
    """Kind of the reduction that its paper uses."""

    def corrects(self) -> bool:
        """Whether its own ratio is taken against μ, so that a weight ρ on top would count the correction twice."""
        ...

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        ...

    def penalty(self, inputs: LossInputs) -> TokenLoss | None:
        """What is added to every token's value after correction; ``None`` for nothing."""
        ...


class Correction(TokenFormula, Protocol):
    """A correction for tokens that were not sampled by π_old: any of them goes with any loss."""

    weighs: ClassVar[bool]
    """Whether it multiplies by ρ (in some form): at most one factor of an objective may."""
    corrects: ClassVar[bool]
    """Whether it bounds the error of training on tokens of older weights."""
    replaces_old: ClassVar[bool]
    """Whether it gives the loss its π_old, so that none has to be kept or computed."""

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """The masks of a whole batch: all that a reduction may look at."""

    mask_N: Tensor
    """bool; with the tokens already removed that cannot carry loss."""
    samples_N: Tensor
    """int64, from 0."""
    episodes_S: Tensor
    """int64: the rollout of each sample; several samples of one rollout count once."""
    groups_S: Tensor
    """int64: the prompt of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Weights before the global denominator is known."""

    weights_N: Tensor
    """float32; 0 outside the mask."""
    mass: Tensor
    """The denominator's share of this layout. The masses of parts that hold whole groups add up to the batch's."""


class Reduction(Protocol):
    """How token losses become one number: Σ weight · token / Σ mass."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """The weight of every token and the mass of them all."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The objective of a micro-batch: its share of the whole batch's."""

    loss: Tensor
    """Scalar with gradient; the shares of all micro-batches add up to the batch's loss."""
    tokens: Tensor
    """Corrected loss of each token in the shape of the inputs, 0 outside the mask; no gradient."""
    metrics: dict[str, Ratio]


def tensor_of(name: str, value: Any) -> Tensor:
    """``value`` (a tensor, an array, numbers in lists) as a tensor; :class:`ConfigError` for anything else."""
    import torch

    if value is None:
        raise ConfigError(f"{name} is missing", remedy=f"give {name}")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        words = str(error).splitlines()[0]
        raise ConfigError(f"{name} is no table of numbers: {words}", remedy=f"give {name} as a tensor") from None


def log_ratio(log_p: Tensor, log_q: Tensor, limit: float = 20.0) -> Tensor:
    """log(p/q), clamped to ±``limit`` so that its exponential is finite.

    >>> import torch
    >>> log_ratio(torch.tensor([0.0]), torch.tensor([-100.0]))
    tensor([20.])
    """
    return (log_p - log_q).clamp(-limit, limit)
