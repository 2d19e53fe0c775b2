"""One token per row from its logits, each row with its own temperature and seed.

A draw depends on the request's seed and the token's position in its sequence, and on nothing else in the batch.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What was sampled for each row."""

    ids_R: Tensor
    """int64."""
    logprobs_R: Tensor
    """Under the distribution that was sampled from, temperature included; float32. 0 where the choice was greedy."""
    sound_R: Tensor
    """False where the logits held a NaN or +inf, or only −inf: the row's id and logprob mean nothing then."""


def sample(logits_RV: Tensor, temperatures_R: Tensor, uniforms_R: Tensor) -> Draw:
    """Invert each row's cumulative distribution at its uniform; temperature 0 takes the first most likely token.

    The sum runs in float64 and the uniform stays below 1 by more than its rounding, so a token of probability 0 is
    never chosen, and rounding in the logits moves the choice only where the uniform falls on a boundary.

    >>> draw = sample(torch.tensor([[0.0, -torch.inf, 0.0]]), torch.ones(1), torch.tensor([0.7], dtype=torch.float64))
    >>> draw.ids_R.tolist(), round(draw.logprobs_R.item(), 4)
    ([2], -0.6931)
    """
    greedy_R = temperatures_R == 0
    scaled_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R)[:, None]
    top_R = scaled_RV.max(dim=-1)
    shifted_RV = scaled_RV - top_R.values[:, None]
    cdf_RV = shifted_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_R = cdf_RV[:, -1]
    drawn_R = torch.searchsorted(cdf_RV, (uniforms_R * total_R)[:, None], right=True)[:, 0]
    ids_R = torch.where(greedy_R, top_R.indices, drawn_R.clamp_(max=logits_RV.shape[1] - 1))
    logprobs_R = shifted_RV.gather(1, ids_R[:, None])[:, 0] - total_R.log().float()
    return Draw(
        ids_R=ids_R, logprobs_R=torch.where(greedy_R, 0.0, logprobs_R), sound_R=torch.isfinite(total_R)
    )  # fmt: skip


def uniforms(keys_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A uniform in [0, 1) for each (key, position): splitmix64 used as a counter-based hash.

    52 bits, so that the largest times any sum still rounds to less than the sum.

    >>> bool((uniforms(np.array([3, 3], np.uint64), np.array([0, 1])) < 1).all())
    True
    """
    bits = _splitmix(keys_R + positions_R.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def seed_key(seed: int) -> np.uint64:
    """The key of a request's draws: neighbouring seeds give unrelated ones."""
    return np.uint64(_splitmix(np.array([seed % 2**64], np.uint64))[0])


def _splitmix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output of splitmix64 (Steele, Lea, Flood 2014) for each state; uint64 arrays wrap around."""
    mixed = state + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_A
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_B
    return mixed ^ (mixed >> np.uint64(31))
