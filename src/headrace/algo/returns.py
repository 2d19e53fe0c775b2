"""Generalised advantage estimation over padded sequences, and the loss of a critic.

Shape legend: B sequences of T positions, N tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.algo.base import to_tensor
from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Gae(NamedTuple):
    """The result of :func:`gae`: two tensors with the shape of its arguments, 0 outside the mask and without
    gradient."""

    advantages: Tensor
    """The advantage of each token."""
    returns: Tensor
    """Advantage + value: the target of the critic's training."""


def gae(rewards: Any, values: Any, mask: Any, gamma: float = 1.0, lam: float = 1.0) -> Gae:
    """Estimate advantages: A_t = Σ_k (γλ)^k δ_{t+k}, δ_t = r_t + γ·V_{t+1} − V_t, over the tokens in the mask; [B, T]
    or [T]. γ is ``gamma``, the discount, and λ is ``lam``.

    A token outside the mask (an observation, padding) is not a step: it is skipped, and its reward, value and position
    have no effect. The value after the last token is 0. The columns may be tensors or lists. The result has the dtype
    of the values, or float32 if it is not a floating-point type.
    Source: Schulman et al., arXiv 1506.02438, eq. 16.

    >>> import torch
    >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.2, 0.5]), torch.tensor([True, True])).returns
    tensor([1., 1.])
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} is not a discount", remedy=f"choose {name} between 0 and 1")
    columns = {"rewards": rewards, "values": values, "mask": mask}
    given = {name: to_tensor(name, column) for name, column in columns.items()}
    if len({column.shape for column in given.values()}) > 1 or not given["mask"].ndim:
        shapes = ", ".join(f"{name} {tuple(column.shape)}" for name, column in given.items())
        raise ConfigError(f"gae needs columns of one shape, not {shapes}", remedy="give all of them [B, T] or [T]")
    steps, values = given["mask"].bool(), given["values"].detach()
    values = values if values.is_floating_point() else values.float()
    rewards = given["rewards"].detach().to(values.dtype)
    advantages = values.new_zeros(values.shape)
    next_value = next_advantage = values.new_zeros(values.shape[:-1])
    for t in range(values.shape[-1] - 1, -1, -1):
        step = steps[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantage = delta + gamma * lam * next_advantage
        advantages[..., t] = advantage.masked_fill(~step, 0.0)
        # a token outside the mask keeps the estimates of the later tokens
        next_advantage = advantage.where(step, next_advantage)
        next_value = values[..., t].where(step, next_value)
    return Gae(advantages, (advantages + values).masked_fill(~steps, 0.0))


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float | None = None) -> Tensor:
    """Return the critic's loss ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²) per token; without ε, ½·(V − R)².
    V is ``values_N``, R ``returns_N``, V_old, the value before the step, ``old_N``, and ε ``clip``.

    With ε, a value that has moved from V_old by more than ε towards the return has no further gradient. Source:
    Schulman et al., arXiv 1707.06347, with the clipped value of its reference implementation.
    """
    loss_N = (values_N - returns_N).square() / 2
    if clip is None:
        return loss_N
    near_N = old_N + (values_N - old_N).clamp(-clip, clip)
    return loss_N.maximum((near_N - returns_N).square() / 2)
