"""The construction of the optimizer, the schedule of its learning rate, and the settings of single weights by parameter
groups.

rate
lr ┤      ╭───────────── constant
   │     ╱ ╲
   │    ╱    ╲  linear, cosine
   │   ╱       ╲______  min_lr_frac · lr
   └───┴──────────────┴─▶ step
     warmup_steps   total_steps
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.parallel.config import ParameterGroup

if TYPE_CHECKING:
    from headrace.learner.low_bit import EightBitAdamW

NORM_BLOCK = 4096
"""The number of elements whose norm is computed at once in their own dtype."""
PIECE = 1 << 22
"""The number of elements that are converted to float64 at once."""
FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""The types of devices for which torch has AdamW as one fused kernel."""


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the update that produces version ``step + 1``; ``step`` counts from 0. It is 0 during
    the critic's warm-up, after which the schedule begins.

    The rate of each of the ``warmup_steps`` is above 0 and below the peak, so no step is without effect. A decay
    reaches its floor at ``total_steps`` and stays there.

    >>> config = LearnerConfig(lr=1.0, warmup_steps=1, schedule="linear")
    >>> [learning_rate(config, step, total_steps=5) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    critic_steps = config.critic.warmup_steps
    if step < critic_steps:
        return 0.0
    step, total_steps = step - critic_steps, total_steps - critic_steps
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    shape = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[
        config.schedule
    ]
    return config.lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * shape)


class UpdateRule(NamedTuple):
    """The settings by which one trained weight is updated."""

    lr_scale: float
    """The factor of the learning rate."""
    weight_decay: float
    """The decoupled weight decay."""
    betas: tuple[float, float]
    """The decay rates of AdamW."""


def update_rules(named: Mapping[str, Tensor], config: LearnerConfig, **ends: Tensor) -> dict[str, UpdateRule]:
    """Return the update rule of each of the weights ``named``. A weight gets the settings of the first of
    ``learner.optimizer.groups`` that matches its name; other weights get the learner's settings, with weight decay for
    matrices only. ``ends`` are the weights that groups can name ``embeddings`` and ``head``.

    Raises :class:`~headrace.base.errors.ConfigError` for a name in a group that matches no weight, or only weights that
    earlier groups match.
    """
    rules: dict[str, UpdateRule] = {}
    for group in config.optimizer.groups:
        for pattern in group.names:
            end = ends.get(pattern)
            matching = [
                name
                for name, weight in named.items()
                if name not in rules
                and (
                    (end is not None and weight is end)
                    or (pattern == "vectors" and weight.ndim < 2)
                    or fnmatchcase(name, pattern)
                )
            ]
            if not matching:
                raise ConfigError(
                    f"learner.optimizer.groups names {pattern!r}, and no trained weight that is left has that name",
                    remedy="give a name of model.named_parameters() with * for what changes, embeddings, head (unless "
                    "it shares the weight of the embeddings) or vectors, each to one group",
                )
            rules |= {name: _rule(named[name], config, group) for name in matching}
    return {name: rules.get(name) or _rule(weight, config) for name, weight in named.items()}


def _rule(weight: Tensor, config: LearnerConfig, group: ParameterGroup | None = None) -> UpdateRule:
    """Return the update rule of a weight: the learner's settings, overridden by its parameter ``group``; ``None``: no
    group matches it. Vectors have no weight decay unless their group sets one."""
    decay = config.weight_decay if weight.ndim >= 2 else 0.0
    if group is None:
        return UpdateRule(1.0, decay, config.betas)
    own = decay if group.weight_decay is None else group.weight_decay
    return UpdateRule(group.lr_scale, own, group.betas or config.betas)


def build_optimizer(
    parameters: Iterable[Parameter], config: LearnerConfig, rules: Sequence[UpdateRule] | None = None
) -> torch.optim.AdamW | EightBitAdamW:
    """Return AdamW (Loshchilov & Hutter 2019) over ``parameters``. ``rules`` are the update rules of the parameters, in
    their order; ``None``: the learner's settings apply to all. Each parameter group of torch's optimizer has its rule's
    ``lr_scale`` as an entry.

    Raises :class:`~headrace.base.errors.ConfigError` for moments of 8 bits if their package is not installed, or if
    they have no effect."""
    trained = list(parameters)
    by_rule: dict[UpdateRule, list[Parameter]] = {}
    for parameter, rule in zip(trained, rules or [_rule(p, config) for p in trained], strict=True):
        by_rule.setdefault(rule, []).append(parameter)
    groups = [{"params": members, **rule._asdict()} for rule, members in by_rule.items()]
    if config.optimizer.kind == "adamw8bit":
        config.optimizer.refuse_missing()
        from headrace.learner.low_bit import EightBitAdamW

        return EightBitAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    fused = all(p.device.type in FUSED_DEVICES for p in trained)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused or None,
    )


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Return the sum of the squares of all elements of ``tensors``, with a relative error of about 1e-7. The norms of
    short blocks are summed in float64, because torch's norm of a float32 tensor of four million elements has an error
    of a ten-thousandth on a CPU."""
    norms = []
    for flat in (tensor.detach().reshape(-1) for tensor in tensors):
        whole_blocks = len(flat) // NORM_BLOCK * NORM_BLOCK
        norms.append(torch.linalg.vector_norm(flat[:whole_blocks].view(-1, NORM_BLOCK), dim=1).double())
        norms.append(torch.linalg.vector_norm(flat[whole_blocks:]).double()[None])
    return float(torch.cat(norms).square().sum()) if norms else 0.0


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of the products of the elements of two tensors of the same shape, computed in float64, without
    waiting for their device."""
    pairs = zip(first.detach().reshape(-1).split(PIECE), second.detach().reshape(-1).split(PIECE), strict=True)
    return torch.stack([torch.dot(one.double(), other.double()) for one, other in pairs]).sum()
