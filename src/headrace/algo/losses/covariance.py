"""Which tokens would lower the entropy most: those whose advantage and log-probability are both far above the mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.algo.base import LossInputs

if TYPE_CHECKING:
    from torch import Tensor


def largest_covariance(whole: LossInputs, fraction: float) -> Tensor:
    """The ``fraction`` of the batch's tokens (at least one) with the largest (A − mean A)·(log π − mean log π),
    as far as that is above 0 by more than rounding.

    Equal values are chosen together, so that the choice does not depend on the order of tokens.
    Source: Cui et al., arXiv 2505.22617, eq. 7.
    """
    advantages, log_pi = whole.advantages_N[whole.mask_N], whole.log_pi_N[whole.mask_N]
    count = len(log_pi)
    if not count or not fraction:
        return whole.mask_N.new_zeros(len(whole.mask_N))
    covariance_N = (whole.advantages_N - advantages.mean()) * (whole.log_pi_N - log_pi.mean())
    least = covariance_N[whole.mask_N].topk(max(1, int(fraction * count))).values[-1]
    rounding = 1e-6 * advantages.abs().max() * log_pi.abs().max()
    return (covariance_N >= least) & (covariance_N > rounding)
