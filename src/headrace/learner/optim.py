"""The optimizer and the schedule of its learning rate.

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
from collections.abc import Iterable

import torch
from torch.nn import Parameter

from headrace.learner.config import LearnerConfig

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices for which torch has AdamW as one fused kernel."""


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the update that makes version ``step + 1``, where ``step`` counts from 0. It is 0
    during the critic's warm-up, after which the schedule begins.

    Each of the ``warmup_steps`` is above 0 and below the peak, and so is each step of a decay above its floor: no step
    is wasted. After ``total_steps`` the rate stays at the floor.

    >>> config = LearnerConfig(lr=1.0, warmup_steps=1, schedule="linear")
    >>> [learning_rate(config, step, total_steps=5) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    alone = config.critic.warmup_steps
    if step < alone:
        return 0.0
    step, total_steps = step - alone, total_steps - alone
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    decay_steps = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / decay_steps)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[config.schedule]
    return config.lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * shape)


def build_optimizer(parameters: Iterable[Parameter], config: LearnerConfig) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov & Hutter 2019) over ``parameters``, with weight decay on matrices and none on
    vectors."""
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED_DEVICES for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused or None,
    )
