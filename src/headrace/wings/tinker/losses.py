"""The losses of the protocol: plain sums over tokens of functions of log π, the log-probability of each target token.

Shape legend: N positions of a datum, K target tokens of a position. In the formulas, ρ = exp(log π − log μ), with log μ
the ``logprobs`` in the data, A the ``advantages``, and sg the stop-gradient operator. The arguments of a loss function
are log π, the inputs of the datum by name and the options; it returns the loss of each target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.base.errors import ConfigError, nearest
from headrace.wings.tinker.data import ADVANTAGES, LOGPROBS, RATIO_MASK, TARGETS, WEIGHTS

Inputs = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLossFn:
    """A loss of the protocol, with the inputs and options that it reads."""

    compute: Callable[[Tensor, Inputs, Options], Tensor]
    """The function that returns the loss of each target of one datum from its log π, its inputs and the options; their
    sum is minimised."""
    needed: tuple[str, ...]
    """The names of the inputs that every datum must have."""
    optional: tuple[str, ...] = ()
    """The names of the inputs that a datum may have."""
    options: Mapping[str, float | None]
    """The options by name with their defaults; ``None`` marks one that the request must give."""


def _cross_entropy(log_pi: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −w · log π, with w the ``weights`` of the targets, or 1 if none are given."""
    return -log_pi * inputs[WEIGHTS] if WEIGHTS in inputs else -log_pi


def _importance_sampling(log_pi_N: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −ρ · A."""
    return -torch.exp(log_pi_N - inputs[LOGPROBS]) * inputs[ADVANTAGES]


def _ppo(log_pi_N: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −min(ρ A, clip(ρ) A) (Schulman et al. 2017, eq. 7)."""
    return _clipped(torch.exp(log_pi_N - inputs[LOGPROBS]), inputs[ADVANTAGES], options)


def _cispo(log_pi_N: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −sg(clip(ρ)) · A · log π (MiniMax 2025, eq. 4)."""
    ratio_N = torch.exp(log_pi_N - inputs[LOGPROBS])
    return -_clip(ratio_N, options).detach() * inputs[ADVANTAGES] * log_pi_N


def _dro(log_pi_N: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −(A log π − β/2 (log π − log μ)²), with β the option ``beta`` (Richemond et al. 2024, eq. 5)."""
    return -(log_pi_N * inputs[ADVANTAGES] - 0.5 * options["beta"] * (log_pi_N - inputs[LOGPROBS]) ** 2)


def _gspo(log_pi_N: Tensor, inputs: Inputs, options: Options) -> Tensor:
    """Return −min(s A, clip(s) A), where s = exp(mean of log ρ) is one ratio for the whole sequence, over the tokens of
    the mask (Zheng et al. 2025, eq. 5 and 7). Without a mask these are the tokens whose advantage is not 0. Tokens
    outside the mask have no loss."""
    mask_N = inputs[RATIO_MASK] if RATIO_MASK in inputs else (inputs[ADVANTAGES] != 0).float()
    log_ratio = ((log_pi_N - inputs[LOGPROBS]) * mask_N).sum() / mask_N.sum().clamp(min=1.0)
    return _clipped(torch.exp(log_ratio).expand_as(log_pi_N), inputs[ADVANTAGES], options) * mask_N


def _clipped(ratio_N: Tensor, advantages_N: Tensor, options: Options) -> Tensor:
    """Return −min(ratio · A, clip(ratio) · A) for each position."""
    return -torch.minimum(ratio_N * advantages_N, _clip(ratio_N, options) * advantages_N)


def _clip(ratio_N: Tensor, options: Options) -> Tensor:
    """Return the ratios bounded to the options ``clip_low_threshold`` and ``clip_high_threshold``, such as 0.8 and
    1.2."""
    return ratio_N.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


_RL = (TARGETS, LOGPROBS, ADVANTAGES)
_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: dict[str, TokenLossFn] = {
    "cross_entropy": TokenLossFn(compute=_cross_entropy, needed=(TARGETS,), optional=(WEIGHTS,), options={}),
    "importance_sampling": TokenLossFn(compute=_importance_sampling, needed=_RL, options={}),
    "ppo": TokenLossFn(compute=_ppo, needed=_RL, options=_BOUNDS),
    "cispo": TokenLossFn(compute=_cispo, needed=_RL, options=_BOUNDS),
    "dro": TokenLossFn(compute=_dro, needed=_RL, options={"beta": None}),
    "gspo": TokenLossFn(compute=_gspo, needed=_RL, optional=(RATIO_MASK,), options=_BOUNDS),
}
"""The supported losses, by name."""

_REFUSED = {
    "stable_reinforce": "its formula is not published: set loss_fn=importance_sampling",
    "custom": "losses are not stored here: pass the function to forward_backward_custom, and the client computes it",
}


def choose_loss(name: str, requested: Mapping[str, float | str]) -> tuple[TokenLossFn, Options]:
    """Return the loss ``name`` and its options: the defaults, overridden by the options ``requested`` by the client.
    Raises :class:`~headrace.base.errors.ConfigError` for an unknown loss or option, a missing option, and an invalid
    value."""
    if name not in LOSSES:
        remedy = _REFUSED.get(name, nearest(name[:80], LOSSES))
        raise ConfigError(f"loss_fn={name[:80]!r} is not served", remedy=remedy)
    loss = LOSSES[name]
    options: dict[str, float | None] = dict(loss.options)
    for key, value in requested.items():
        if key not in options or isinstance(value, str) or not -torch.inf < value < torch.inf:
            known = ", ".join(options) or "none"
            raise ConfigError(f"loss_fn_config: {key}={value!r} for loss_fn={name!r}", remedy=f"its options: {known}")
        options[key] = float(value)
    missing = [key for key, value in options.items() if value is None]
    if missing:
        raise ConfigError(f"loss_fn={name!r} needs {missing[0]}", remedy=f"give loss_fn_config={{'{missing[0]}': ...}}")
    numbers = {key: value for key, value in options.items() if value is not None}
    if not 0.0 <= numbers.get("clip_low_threshold", 0.0) <= numbers.get("clip_high_threshold", 0.0):
        raise ConfigError(
            f"loss_fn_config: {', '.join(f'{key}={value:g}' for key, value in numbers.items())}",
            remedy="give 0 <= clip_low_threshold <= clip_high_threshold: the bounds of the ratio, such as .8 and 1.2",
        )
    if numbers.get("beta", 0.0) < 0.0:
        raise ConfigError(f"loss_fn_config: beta={numbers['beta']:g}", remedy="give 0 or more")
    return loss, numbers
