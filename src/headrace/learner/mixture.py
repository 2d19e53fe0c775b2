"""The balance of a mixture of experts: its losses and its biases, exact over a whole step, and metrics of the experts'
load.

    pass over a micro-batch ──▶ routers: logits_NE, experts_NK ──▶ choices per expert, probabilities per expert, log Z
    balance loss: choices of the whole step (a pass without gradient first) · probabilities of each micro-batch
    z-loss: mean log² Z over the whole step
    bias of an expert: after each update, up or down by the sign of what its choices are short of the mean

The balance loss is that of Switch Transformers (Fedus et al. 2021, eq. 4 to 6) as transformers defines it for all
layers together: E · Σ_e F_e · P_e, where F_e is the number of choices of expert e and P_e the sum of its softmax
probabilities, both divided by the number of tokens times layers. It is not a sum over tokens, so that its value over a
micro-batch would be another loss. F has no gradient and is known before the first backward pass: then each micro-batch
adds its part of P, and the gradients add up to that of the whole step. The z-loss is that of ST-MoE (Zoph et al. 2022,
eq. 5). The biases move as those of DeepSeek-V3 do (arXiv 2412.19437, section 2.1.2); they have no gradient, affect the
choice only, and belong to a version as the weights do.

A token that several samples share counts once for each. The last token of a sample, after which nothing is predicted,
is not computed and does not count. Where routing is replayed, the choices are the recorded ones. Routers that choose by
a bias or by groups as well (Laguna, Ernie 4.5) have the balance loss of their logits, as transformers defines it: F_e
then counts the tokens that have e among the experts of their greatest logits, whatever they chose.

Shape legend: N rows of a pass, L mixture-of-experts layers, E experts, K experts per token and layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headrace.algo.base import Ratio
from headrace.base.errors import ConfigError
from headrace.learner.config import MixtureConfig
from headrace.learner.packing import MicroBatch
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.shards import local, part_of, whole
from headrace.models.routing import RoutedModel
from headrace.models.weights import correction_biases, is_adapted

_BALANCE_LOSS = "load_balancing_loss_func"
"""The function of the modules of transformers that define a balance loss."""


@dataclass(slots=True)
class _Pass:
    """The sums of what the routers computed in one forward pass over a micro-batch. The hooks of the routers fill
    it."""

    copies_N: Tensor
    """Number of tokens that each row of the pass stands for."""
    counts_LE: Tensor
    """Number of tokens that chose each expert."""
    ranked_LE: Tensor
    """Number of tokens for which each expert counts in the balance loss."""
    probabilities: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of the probabilities of each expert ``[E]``, with gradient."""
    squares: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of log² Z, with gradient."""


class MixtureBalance:
    """The losses, the biases and the load of the experts of one model. ``routed`` is ``None`` for a dense model. The
    learner calls it around the passes of each step.

    Where ranks share out tokens of a sequence or tensors, the load is not measured, and losses and moving biases are
    refused. Each of the ranks that share out experts routes tokens of its own.
    """

    def __init__(self, config: MixtureConfig, model: nn.Module, routed: RoutedModel | None, ranks: AnyRanks) -> None:
        """Hook into the routers of ``model``. Raises :class:`~headrace.base.errors.ConfigError` if it cannot be
        balanced as ``config`` says."""
        self.config = config
        self._ranks = ranks
        self._now: _Pass | None = None
        self._last: _Pass | None = None
        self._share_E: Tensor | None = None
        self._places = 0.0
        parallel = ranks.config
        parted = parallel.context * parallel.tensor > 1  # a rank sees a part of a router's work, or the work of others
        if config.acts:
            _refuse(config, model, routed, parted=parted)
        self._routed = routed = None if parted else routed
        for index, layer in enumerate(() if routed is None else routed.layers):
            # before the hook that hides the experts of other ranks, if there is one
            layer.router.register_forward_hook(partial(self._see, index), prepend=True)
        self._losses: list[Tensor] = []
        """This rank's parts of the balance loss and the z-loss ``[2]``, without coefficients, since :meth:`begin`."""
        self._load_LE = self._zeros()
        self._ranked_LE = self._zeros()
        """Number of tokens for which each expert counts in the balance loss, in the passes since :meth:`begin`."""
        self._chosen_LE = self._zeros()
        """Number of tokens that chose each expert since the last update, on all ranks."""

    def begin(self, packed: list[MicroBatch]) -> None:
        """Begin a step whose micro-batches on this rank are ``packed``: the sums start at 0, and the tokens of all
        ranks are counted, by which the losses are divided."""
        if self._routed is None:
            return
        tokens = sum(int((micro.lengths_K - 1).sum()) for micro in packed)
        total = self._ranks.join_shares(torch.tensor([float(tokens)], dtype=torch.float64))
        self._places = max(1.0, float(total) * self._routed.num_layers)
        self._load_LE, self._ranked_LE = self._zeros(), self._zeros()
        self._losses = []

    def counted(self) -> None:
        """Fix the choices F of the balance loss as those of all passes since :meth:`begin`, on all ranks. It is called
        after the passes without gradient, which then no longer count as load."""
        self._share_E = self._ranks.join_shares(self._ranked_LE).sum(0) / self._places
        self._load_LE = self._zeros()

    @contextmanager
    def watching(self, micro: MicroBatch, num_rows: int) -> Iterator[None]:
        """Collect what the routers compute in the pass over ``micro`` inside the ``with`` block. ``num_rows`` is the
        number of rows of that pass."""
        if self._routed is None:
            yield
            return
        copies_N = torch.from_numpy(_copies(micro, num_rows)).to(self._ranks.device)
        counts_LE, ranked_LE = (torch.zeros_like(self._load_LE, device=copies_N.device) for _ in range(2))
        self._now = _Pass(copies_N, counts_LE, ranked_LE)
        try:
            yield
            self._load_LE += self._now.counts_LE.cpu()
            self._ranked_LE += self._now.ranked_LE.cpu()
        finally:
            self._last, self._now = self._now, None

    def loss(self) -> Tensor | None:
        """Return the part of the balance loss and the z-loss, times their coefficients, of the micro-batch whose pass
        has just ended, with gradient; ``None`` if no such loss is trained."""
        if not self.config.trains:
            return None
        seen = self._last
        assert seen is not None
        z = torch.stack(seen.squares).sum() / self._places
        balance = torch.zeros_like(z)
        if self.config.balance_coef:
            assert self._share_E is not None
            assert self._routed is not None
            mean_E = torch.stack(seen.probabilities).sum(0) / self._places
            balance = self._routed.num_experts * (self._share_E.to(mean_E) * mean_E).sum()
        self._losses.append(torch.stack([balance, z]).detach())
        return self.config.balance_coef * balance + self.config.z_coef * z

    def finish(self) -> dict[str, Ratio]:
        """End the passes since :meth:`begin`. Return how evenly they used the experts, over all ranks; empty for a
        dense model.

        ``balance_loss`` and ``router_z_loss`` are the losses without their coefficients, where they are trained.
        ``expert_load_max`` and ``expert_load_min`` are the load of the most and the least used expert of any layer,
        relative to an even load; ``experts_idle`` is the fraction of experts that no token chose.
        """
        if self._routed is None:
            return {}
        load_LE = self._ranks.join_shares(self._load_LE)
        self._chosen_LE += load_LE
        even_L1 = load_LE.mean(1, keepdim=True).clamp(min=1e-9)
        found = {
            "expert_load_max": float((load_LE / even_L1).max()),
            "expert_load_min": float((load_LE / even_L1).min()),
            "experts_idle": float((load_LE == 0).double().mean()),
        }
        if self._losses:
            total_2 = self._ranks.join_shares(torch.stack(self._losses).sum(0).double().cpu())
            found |= dict(zip(("balance_loss", "router_z_loss"), total_2.tolist(), strict=True))
            if not self.config.balance_coef:
                del found["balance_loss"]
        return {name: Ratio(value, 1.0) for name, value in found.items()}

    def move_biases(self, *, trained: bool) -> dict[str, float]:
        """Move the bias of every expert, after an update, towards an even load of the choices since the update before.
        Return the spread of the biases as a metric; empty if they do not move, as where nothing was ``trained``."""
        rate, routed, chosen_LE = self.config.bias_rate, self._routed, self._chosen_LE
        self.forget_choices()
        if not (rate and trained) or routed is None:
            return {}
        biases = [bias for layer in routed.layers for bias in correction_biases(layer.router).values()]
        for bias, chosen_E in zip(biases, chosen_LE, strict=True):
            step_E = (chosen_E.mean() - chosen_E).sign().to(bias.device, bias.dtype)
            local(bias).add_(part_of(step_E.reshape(bias.shape), bias), alpha=rate)
        return {"expert_bias_spread": max(float(full.max() - full.min()) for full in map(whole, biases))}

    def forget_choices(self) -> None:
        """Forget which experts were chosen since the last update. It is called when they have moved the biases, and
        when the gradient of their tokens is discarded."""
        self._chosen_LE = self._zeros()

    def _see(self, index: int, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        """Add what the router of layer ``index`` chose in this pass to the sums. It is called as a forward hook of the
        router, also for a layer that the backward pass computes again, whose choices are not counted twice."""
        assert self._routed is not None
        logits_NE, _, experts_NK = self._routed.known.read(output)
        seen = self._now
        if seen is None:  # another pass, or a layer that is computed again: it must save the same tensors
            seen = self._last
            if seen is None or not torch.is_grad_enabled() or len(seen.copies_N) != len(logits_NE):
                return
            seen = replace(
                seen, counts_LE=seen.counts_LE.clone(), ranked_LE=seen.ranked_LE.clone(), probabilities=[], squares=[]
            )
        _count(seen.counts_LE[index], experts_NK, seen.copies_N)
        if self.config.balance_coef:
            by_logits = self._routed.known.chooses_by_logits
            ranked_NK = experts_NK if by_logits else logits_NE.topk(experts_NK.shape[1]).indices
            _count(seen.ranked_LE[index], ranked_NK, seen.copies_N)
        if not (self.config.trains and torch.is_grad_enabled()):
            return
        logits_NE, copies_N1 = logits_NE.float(), seen.copies_N[:, None].to(torch.float32)
        if self.config.balance_coef:
            seen.probabilities.append((logits_NE.softmax(-1) * copies_N1).sum(0))
        seen.squares.append((logits_NE.logsumexp(-1) ** 2 * copies_N1[:, 0]).sum())

    def _zeros(self) -> Tensor:
        """Return a count of 0 for each layer and expert, ``[L, E]``; ``[0, 0]`` for a dense model."""
        routed = self._routed
        shape = (0, 0) if routed is None else (routed.num_layers, routed.num_experts)
        return torch.zeros(shape, dtype=torch.float64)


def _count(counts_E: Tensor, experts_NK: Tensor, copies_N: Tensor) -> None:
    """Add the number of tokens that chose each expert to ``counts_E``, in place. ``experts_NK`` are the chosen experts
    of each row; row n stands for ``copies_N[n]`` tokens."""
    weights_NK = copies_N[:, None].expand(experts_NK.shape).double()
    counts_E.scatter_add_(0, experts_NK.reshape(-1), weights_NK.reshape(-1))


def _copies(micro: MicroBatch, num_rows: int) -> np.ndarray[Any, Any]:
    """Return the number of tokens that each of the ``num_rows`` rows of the pass over ``micro`` stands for, ``[N]``. It
    is above 1 where samples share a row, and 0 throughout for an empty micro-batch."""
    if not len(micro.places_M):
        return np.zeros(num_rows)
    followed_M = np.ones(len(micro.places_M), np.bool_)
    followed_M[np.cumsum(micro.lengths_K) - 1] = False  # as the pass leaves the last tokens out
    rows_M = np.arange(len(micro.places_M)) if micro.rows_M is None else micro.rows_M
    _, copies_N = np.unique(rows_M[followed_M], return_counts=True)
    return copies_N.astype(np.float64)


def _refuse(config: MixtureConfig, model: nn.Module, routed: RoutedModel | None, *, parted: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a model or ranks that the losses do not cover."""
    if routed is None:
        raise ConfigError(
            f"learner.mixture balances the experts of a mixture, and a {type(model).__name__} has none "
            "whose routing is known",
            remedy="leave learner.mixture out",
        )
    known = routed.known
    balanced = known.gives_logits and _has_balance_loss(routed)
    biased = all(len(correction_biases(layer.router)) == 1 for layer in routed.layers)
    if config.balance_coef and not balanced:
        raise ConfigError(
            f"learner.mixture.balance_coef={config.balance_coef}: transformers defines no balance loss for a "
            f"{type(model).__name__}",
            remedy="set learner.mixture.bias_rate instead" if biased else "leave learner.mixture.balance_coef out",
        )
    if config.z_coef and not known.gives_logits:
        raise ConfigError(
            f"learner.mixture.z_coef={config.z_coef}: it is a loss of logits, and the routers of "
            f"a {type(model).__name__} return probabilities",
            remedy="leave learner.mixture.z_coef out",
        )
    if config.bias_rate and is_adapted(model):
        raise ConfigError(
            f"learner.mixture.bias_rate={config.bias_rate} with model.lora: the biases are part of the base model, "
            "which an adapter leaves as it is",
            remedy="leave learner.mixture.bias_rate out, or model.lora",
        )
    if config.bias_rate and not biased:
        raise ConfigError(
            f"learner.mixture.bias_rate={config.bias_rate}: the routers of a {type(model).__name__} choose without a "
            "correction bias",
            remedy="set learner.mixture.balance_coef instead" if balanced else "leave learner.mixture.bias_rate out",
        )
    if parted:
        raise ConfigError(
            "learner.mixture with learner.parallel.context or tensor above 1: ranks would see parts of a router's "
            "tokens, or the same ones",
            remedy="use learner.parallel.data, replicate and expert, or leave learner.mixture out",
        )


def _has_balance_loss(routed: RoutedModel) -> bool:
    """Return whether transformers defines a balance loss for the routers' family."""
    kinds = type(routed.layers[0].router).__mro__
    return any(_BALANCE_LOSS in vars(sys.modules[kind.__module__]) for kind in kinds)
