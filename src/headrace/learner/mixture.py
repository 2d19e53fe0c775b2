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
is not computed and does not count. Where routing is replayed, the choices are the recorded ones.

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
from headrace.models.routing import RoutedModel
from headrace.models.weights import CORRECTION_BIAS, is_adapted

_BALANCE_LOSS = "load_balancing_loss_func"
"""The function of the modules of transformers that define a balance loss."""


@dataclass(slots=True)
class _Pass:
    """What the routers of one pass computed."""

    copies_N: Tensor
    """Number of tokens that each row of the pass stands for."""
    counts_LE: Tensor
    """Number of tokens that chose each expert."""
    probabilities: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of the probabilities of each expert ``[E]``, with gradient."""
    squares: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of log² Z, with gradient."""


class MixtureBalance:
    """The losses, the biases and the load of the experts of one model. ``routed`` is ``None`` for a dense model.

    Where ranks share out tokens of a sequence or tensors, the load is not measured, and losses and moving biases are
    refused. Each of the ranks that share out experts routes tokens of its own.
    """

    def __init__(self, config: MixtureConfig, model: nn.Module, routed: RoutedModel | None, ranks: AnyRanks) -> None:
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
        self._load_LE = self._zeros()
        self._chosen_LE = self._zeros()
        """Number of tokens that chose each expert since the last update, on all ranks."""

    def begin(self, packed: list[MicroBatch]) -> None:
        """Begin a step whose micro-batches on this rank are ``packed``."""
        if self._routed is None:
            return
        tokens = sum(int((micro.lengths_K - 1).sum()) for micro in packed)
        total = self._ranks.join_shares(torch.tensor([float(tokens)], dtype=torch.float64))
        self._places = max(1.0, float(total) * self._routed.num_layers)
        self._load_LE = self._zeros()

    def counted(self) -> None:
        """Fix the choices of the step: those of all passes since :meth:`begin`, on all ranks."""
        self._share_E = self._ranks.join_shares(self._load_LE).sum(0) / self._places
        self._load_LE = self._zeros()

    @contextmanager
    def watching(self, micro: MicroBatch, num_rows: int) -> Iterator[None]:
        """Collect what the routers compute in the pass over ``micro`` within this context."""
        if self._routed is None:
            yield
            return
        copies_N = torch.from_numpy(_copies(micro, num_rows)).to(self._ranks.device)
        self._now = _Pass(copies_N, torch.zeros(self._load_LE.shape, dtype=torch.float64, device=copies_N.device))
        try:
            yield
            self._load_LE += self._now.counts_LE.cpu()
        finally:
            self._last, self._now = self._now, None

    def loss(self) -> Tensor | None:
        """Return this micro-batch's part of the losses, after its pass; ``None`` if there are none."""
        if not self.config.trains:
            return None
        seen = self._last
        assert seen is not None
        total = torch.stack(seen.squares).sum() * (self.config.z_coef / self._places)
        if self.config.balance_coef:
            assert self._share_E is not None
            assert self._routed is not None
            share_E = self._share_E.to(total)
            mean_E = torch.stack(seen.probabilities).sum(0) / self._places
            total = total + self.config.balance_coef * self._routed.num_experts * (share_E * mean_E).sum()
        return total

    def finish(self) -> dict[str, Ratio]:
        """End the passes since :meth:`begin`. Return how evenly they used the experts, over all ranks; empty for a
        dense model.

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
        return {name: Ratio(value, 1.0) for name, value in found.items()}

    def move_biases(self, *, trained: bool) -> dict[str, float]:
        """Move the bias of every expert, after an update, towards an even load of the choices since the update before.
        Return the spread of the biases as a metric; empty if they do not move, as where nothing was ``trained``."""
        rate, routed, chosen_LE = self.config.bias_rate, self._routed, self._chosen_LE
        self.forget_choices()
        if not (rate and trained) or routed is None:
            return {}
        biases = [layer.router.get_buffer(CORRECTION_BIAS) for layer in routed.layers]
        for bias_E, chosen_E in zip(biases, chosen_LE, strict=True):
            bias_E.add_((chosen_E.mean() - chosen_E).sign().to(bias_E), alpha=rate)
        return {"expert_bias_spread": max(float(bias_E.max() - bias_E.min()) for bias_E in biases)}

    def forget_choices(self) -> None:
        """Forget the choices since the last update, whose gradient is discarded."""
        self._chosen_LE = self._zeros()

    def _see(self, index: int, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        """Add what the router of layer ``index`` chose in this pass to the sums; called as a forward hook of the
        router."""
        assert self._routed is not None
        logits_NE, _, experts_NK = self._routed.known.read(output)
        seen = self._now
        if seen is None:  # another pass, or a layer that is computed again: it must save the same tensors
            seen = self._last
            if seen is None or not torch.is_grad_enabled() or len(seen.copies_N) != len(logits_NE):
                return
            seen = replace(seen, counts_LE=seen.counts_LE.clone(), probabilities=[], squares=[])
        weights_NK = seen.copies_N[:, None].expand(experts_NK.shape).double()
        seen.counts_LE[index].scatter_add_(0, experts_NK.reshape(-1), weights_NK.reshape(-1))
        if not (self.config.trains and torch.is_grad_enabled()):
            return
        logits_NE, copies_N1 = logits_NE.float(), seen.copies_N[:, None].to(torch.float32)
        if self.config.balance_coef:
            seen.probabilities.append((logits_NE.softmax(-1) * copies_N1).sum(0))
        seen.squares.append((logits_NE.logsumexp(-1) ** 2 * copies_N1[:, 0]).sum())

    def _zeros(self) -> Tensor:
        routed = self._routed
        shape = (0, 0) if routed is None else (routed.num_layers, routed.num_experts)
        return torch.zeros(shape, dtype=torch.float64)


def _copies(micro: MicroBatch, num_rows: int) -> np.ndarray[Any, Any]:
    """Return the number of tokens that each row of the pass over ``micro`` stands for."""
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
    if config.balance_coef and not (known.chooses_by_logits and known.gives_logits and _has_balance_loss(routed)):
        raise ConfigError(
            f"learner.mixture.balance_coef={config.balance_coef}: transformers defines no balance loss for the choices "
            f"of a {type(model).__name__}",
            remedy="set learner.mixture.bias_rate instead if its routers have a correction bias; z_coef is possible "
            "without",
        )
    if config.z_coef and not known.gives_logits:
        raise ConfigError(
            f"learner.mixture.z_coef={config.z_coef}: it is a loss of logits, and the routers of "
            f"a {type(model).__name__} return probabilities",
            remedy="leave learner.mixture.z_coef out",
        )
    if config.bias_rate:
        _refuse_fixed_biases(config, model, routed)
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


def _refuse_fixed_biases(config: MixtureConfig, model: nn.Module, routed: RoutedModel) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a model whose biases cannot move."""
    if any(CORRECTION_BIAS not in dict(layer.router.named_buffers()) for layer in routed.layers):
        raise ConfigError(
            f"learner.mixture.bias_rate={config.bias_rate}: the routers of a {type(model).__name__} choose without a "
            "correction bias",
            remedy="set learner.mixture.balance_coef instead",
        )
    if is_adapted(model):
        raise ConfigError(
            f"learner.mixture.bias_rate={config.bias_rate} with model.lora: the biases are part of the base model, "
            "which an adapter leaves as it is",
            remedy="leave learner.mixture.bias_rate out, or model.lora",
        )
