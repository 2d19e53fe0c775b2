"""Estimators of KL(π‖π_ref) from one sampled token per position. Source: J. Schulman, "Approximating KL divergence"
(2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headrace.algo.base import log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
"""The name of an estimator. :func:`estimate` contains the formulas."""


def estimate(kind: Estimator, log_pi: Tensor, log_ref: Tensor) -> Tensor:
    """Return an estimate of KL(π‖π_ref) per token, for tensors of any shape, by the estimator ``kind``. With
    x = ``log_ref`` − ``log_pi`` (log π_ref − log π), clamped to ±20: k1 = −x, k2 = x²/2, k3 = eˣ − 1 − x.

    k1 is unbiased and may be negative; k2 has the right gradient on samples of π; k3 is unbiased and never negative.
    The gradient is 0 where x is clamped.

    >>> import torch
    >>> estimate("k3", torch.tensor([-1.0]), torch.tensor([-2.0]))
    tensor([0.3679])
    """
    x = log_ratio(log_ref, log_pi)
    match kind:
        case "k1":
            return -x
        case "k2":
            return x.square() / 2
        case "k3":
            return x.expm1() - x
