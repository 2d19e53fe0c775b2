"""What a loss, a correction, a reduction and an advantage are.

    advantages      rewards of groups ──▶ one number per episode                 (numpy, in the controller)
    reduction       masks of the whole batch ──▶ one weight per token            (torch, once per step)
    loss            a micro-batch's columns ──▶ one value per token
    correction      a micro-batch's columns ──▶ one factor per token, without gradient
    objective       Σ weight · factor · value                                    a sum: exact for any micro-batching

Every normalisation lies in the reduction's weights, and they are made from the masks of the whole batch before the
first forward pass. So the objective of a batch is a plain sum over its tokens, and its value and gradient do not depend
on how the batch is cut, packed or spread over ranks.

Shape legend: N tokens of the samples one after the other; S samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Token-aligned columns of whole samples, one after the other. Values outside the mask have no influence."""

    log_pi_N: Tensor
    """log π under the weights that are being trained; carries the gradient."""
    log_old_N: Tensor
    """log π_old: the learner's weights before this step's update; no gradient."""
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

    def ages_N(self) -> Tensor:
        """Age of each token in versions; meaningless outside the mask."""
        return self.version_now - self.versions_N


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric that adds up exactly over micro-batches and ranks: total / count."""

    total: Tensor
    count: Tensor | float


Metrics = Mapping[str, Ratio]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a loss makes of a micro-batch, before any reduction."""

    tokens_N: Tensor
    """To be minimised; anything outside the mask is ignored."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What a correction makes of a micro-batch."""

    tokens_N: Tensor
    """Weight (or 0/1 mask) that multiplies the loss of each token; carries no gradient."""
    metrics: Metrics = field(default_factory=dict)


class Loss(Protocol):
    """A loss: a small frozen config with one method."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        ...


class Correction(Protocol):
    """A correction for tokens that were not sampled by π_old: any of them goes with any loss."""

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
    """int64, from 0: the rollout of each sample; several samples of one rollout count once."""
    groups_S: Tensor
    """int64, from 0: the prompt of each sample."""


class Reduction(Protocol):
    """How token losses become one number."""

    def __call__(self, layout: BatchLayout) -> Tensor:
        """The weight of every token (N, float32): numerator and global denominator in one; 0 outside the mask."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The objective of a micro-batch: its share of the whole batch's."""

    loss: Tensor
    """Scalar with gradient; the shares of all micro-batches add up to the batch's loss."""
    tokens_N: Tensor
    """Corrected loss of each token, 0 outside the mask; no gradient."""
    metrics: dict[str, Ratio]


def log_ratio(log_p: Tensor, log_q: Tensor, limit: float = 20.0) -> Tensor:
    """log(p/q), clamped to ±``limit`` so that its exponential is finite.

    >>> log_ratio(torch.tensor([0.0]), torch.tensor([-100.0]))
    tensor([20.])
    """
    return (log_p - log_q).clamp(-limit, limit)
