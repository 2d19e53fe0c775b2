"""The load balancing of a mixture of experts: auxiliary losses and router biases, computed exactly over a whole step,
and metrics of the experts' load.

    pass over a micro-batch ──▶ routers: logits_NE, experts_NK ──▶ choices and probabilities per expert, log Z
    balance loss: choices of the whole step (counted in passes without gradient) · probabilities of each micro-batch
    z-loss: mean log² Z over the whole step
    bias of an expert: after each update, increased if the expert was selected less than the mean, else decreased

The balance loss was defined for Switch Transformers (Fedus et al. 2021, eq. 4 to 6); here it has the form of
transformers, over all layers together: E · Σ_e F_e · P_e, where F_e is the number of choices of expert e and P_e the
sum of its softmax probabilities, both divided by the number of tokens times layers. It is not a sum over tokens, so it
cannot be computed for each micro-batch separately. F has no gradient, and is counted before the first backward pass.
Each micro-batch then contributes its part of P, and the gradients add up to the gradient of the whole step. The z-loss
is from ST-MoE (Zoph et al. 2022, eq. 5). The biases are updated as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2);
they have no gradient, affect only the choice of experts, and are part of a version like the weights.

A token that several samples share counts once for each sample. The last token of a sample is not computed and does not
count, because no token is predicted after it. With replayed routing, the choices are the recorded experts. For routers
that also choose by a bias or by groups (Laguna, Ernie 4.5), the balance loss depends on the logits only, as in
transformers: F_e counts the tokens for which e is among the experts with the largest logits.

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
from headrace.learner.parallel.shards import gather_whole, local_shard, slice_shard
from headrace.models.routing import RoutedModel
from headrace.models.weights import correction_biases, is_adapted

_BALANCE_LOSS = "load_balancing_loss_func"
"""The name of the function that computes a balance loss in modules of transformers."""


@dataclass(slots=True)
class _Pass:
    """The counts and sums over the outputs of all routers in one forward pass over a micro-batch. The hooks of the
    routers add to them."""

    copies_N: Tensor
    """The number of tokens of the batch that each row of the pass represents."""
    counts_LE: Tensor
    """The number of tokens for which each expert was selected."""
    ranked_LE: Tensor
    """The number of tokens for which each expert counts in F of the balance loss."""
    probabilities: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of the probabilities of each expert ``[E]``, with gradient."""
    squares: list[Tensor] = field(default_factory=list)
    """For each layer, the sum of log² Z, with gradient."""


class MixtureBalance:
    """The auxiliary losses, the router biases and the load of the experts of one model. Without a mixture (``routed``
    is ``None``) all methods do nothing. The learner calls it around the passes of each step.

    With context or tensor parallelism the load is not measured, and losses and bias updates are refused. With expert
    parallelism each rank routes its own tokens.
    """

    def __init__(self, config: MixtureConfig, model: nn.Module, routed: RoutedModel | None, ranks: AnyRanks) -> None:
        """Register hooks at the routers of ``model``, whose layers ``routed`` describes. Raises
        :class:`~headrace.base.errors.ConfigError` if ``config`` requires a loss or a bias that this model or these
        ranks do not support."""
        self.config = config
        self._ranks = ranks
        self._current: _Pass | None = None
        """The sums over the pass that is running; ``None`` between passes."""
        self._last: _Pass | None = None
        """The sums over the latest pass that has ended; ``None`` before the first."""
        self._share_E: Tensor | None = None
        """F of the balance loss for each expert (see the module); ``None`` before the first :meth:`counted`."""
        self._num_token_layers = 0.0
        """The number of pairs (token, layer) by which the losses are divided, on all ranks."""
        parallel = ranks.config
        # a rank computes a part of a router's tokens, or the same tokens as other ranks
        is_divided = parallel.context * parallel.tensor > 1
        if config.has_effect:
            _refuse(config, model, routed, is_divided=is_divided)
        self._routed = routed = None if is_divided else routed
        for index, layer in enumerate(() if routed is None else routed.layers):
            # first, before a hook that masks the experts of other ranks
            layer.router.register_forward_hook(partial(self._add_outputs, index), prepend=True)
        self._losses: list[Tensor] = []
        """This rank's parts of the balance loss and the z-loss ``[2]``, without coefficients, since :meth:`begin`."""
        self._load_LE = self._zeros()
        """The number of tokens that each expert of each layer got, in the passes since :meth:`begin`."""
        self._ranked_LE = self._zeros()
        """The number of tokens for which each expert counts in F, in the passes since :meth:`begin`."""
        self._selected_LE = self._zeros()
        """The number of tokens for which each expert was selected since the last update, on all ranks."""

    def begin(self, packed: list[MicroBatch]) -> None:
        """Start a step whose micro-batches on this rank are ``packed``: reset the sums, and count the tokens of all
        ranks, by which the losses are divided."""
        if self._routed is None:
            return
        tokens = sum(int((micro.lengths_K - 1).sum()) for micro in packed)
        total = self._ranks.join_shares(torch.tensor([float(tokens)], dtype=torch.float64))
        self._num_token_layers = max(1.0, float(total) * self._routed.num_layers)
        self._load_LE, self._ranked_LE = self._zeros(), self._zeros()
        self._losses = []

    def counted(self) -> None:
        """Compute F of the balance loss from all passes since :meth:`begin`, on all ranks. Called after the passes
        without gradient, which do not count as load."""
        self._share_E = self._ranks.join_shares(self._ranked_LE).sum(0) / self._num_token_layers
        self._load_LE = self._zeros()

    @contextmanager
    def watching(self, micro: MicroBatch, num_rows: int) -> Iterator[None]:
        """Return a context that counts the outputs of the routers in the pass over ``micro``, which has ``num_rows``
        rows."""
        if self._routed is None:
            yield
            return
        copies_N = torch.from_numpy(_copies(micro, num_rows)).to(self._ranks.device)
        counts_LE, ranked_LE = (torch.zeros_like(self._load_LE, device=copies_N.device) for _ in range(2))
        self._current = _Pass(copies_N, counts_LE, ranked_LE)
        try:
            yield
            self._load_LE += self._current.counts_LE.cpu()
            self._ranked_LE += self._current.ranked_LE.cpu()
        finally:
            self._last, self._current = self._current, None

    def loss(self) -> Tensor | None:
        """Return the contribution of the micro-batch of the last pass to the balance loss and the z-loss, times their
        coefficients, with gradient; ``None`` if no such loss is trained."""
        if not self.config.has_losses:
            return None
        sums = self._last
        assert sums is not None
        z = torch.stack(sums.squares).sum() / self._num_token_layers
        balance = torch.zeros_like(z)
        if self.config.balance_coef:
            assert self._share_E is not None
            assert self._routed is not None
            mean_E = torch.stack(sums.probabilities).sum(0) / self._num_token_layers
            balance = self._routed.num_experts * (self._share_E.to(mean_E) * mean_E).sum()
        self._losses.append(torch.stack([balance, z]).detach())
        return self.config.balance_coef * balance + self.config.z_coef * z

    def finish(self) -> dict[str, Ratio]:
        """End the passes since :meth:`begin`, and return metrics of the experts' load over all ranks; empty for a dense
        model.

        ``balance_loss`` and ``router_z_loss`` are the losses without their coefficients, if they are trained.
        ``expert_load_max`` and ``expert_load_min`` are the load of the most and the least used expert of any layer,
        relative to an even load; ``experts_idle`` is the fraction of experts that no token selected.
        """
        if self._routed is None:
            return {}
        load_LE = self._ranks.join_shares(self._load_LE)
        self._selected_LE += load_LE
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
        """Update the bias of every expert after an update of the weights, towards an even load, by the number of tokens
        for which it was selected since the last update. Return the spread of the biases as a metric; empty if biases
        are not updated. ``trained`` is false if the weights did not change; the biases then do not change either."""
        rate, routed, selected_LE = self.config.bias_rate, self._routed, self._selected_LE
        self.forget_choices()
        if not (rate and trained) or routed is None:
            return {}
        biases = [bias for layer in routed.layers for bias in correction_biases(layer.router).values()]
        for bias, selected_E in zip(biases, selected_LE, strict=True):
            step_E = (selected_E.mean() - selected_E).sign().to(bias.device, bias.dtype)
            local_shard(bias).add_(slice_shard(step_E.reshape(bias.shape), bias), alpha=rate)
        return {"expert_bias_spread": max(float(full.max() - full.min()) for full in map(gather_whole, biases))}

    def forget_choices(self) -> None:
        """Reset the counts of choices since the last update. Called when the biases have been updated, and when the
        gradient of these tokens is discarded."""
        self._selected_LE = self._zeros()

    def _add_outputs(self, index: int, _router: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> None:
        """Add the choices and probabilities in ``output``, which the router of layer ``index`` returned, to the sums of
        this pass. This is a forward hook of the router. When the backward pass computes a layer again, its choices are
        not counted twice."""
        assert self._routed is not None
        logits_NE, _, experts_NK = self._routed.known.read(output)
        sums = self._current
        # an unrelated pass, or a recomputed layer, which must save the same tensors for the backward pass
        if sums is None:
            sums = self._last
            if sums is None or not torch.is_grad_enabled() or len(sums.copies_N) != len(logits_NE):
                return
            sums = replace(
                sums, counts_LE=sums.counts_LE.clone(), ranked_LE=sums.ranked_LE.clone(), probabilities=[], squares=[]
            )
        _count(sums.counts_LE[index], experts_NK, sums.copies_N)
        if self.config.balance_coef:
            by_logits = self._routed.known.chooses_by_logits
            ranked_NK = experts_NK if by_logits else logits_NE.topk(experts_NK.shape[1]).indices
            _count(sums.ranked_LE[index], ranked_NK, sums.copies_N)
        if not (self.config.has_losses and torch.is_grad_enabled()):
            return
        logits_NE, copies_N1 = logits_NE.float(), sums.copies_N[:, None].to(torch.float32)
        if self.config.balance_coef:
            sums.probabilities.append((logits_NE.softmax(-1) * copies_N1).sum(0))
        sums.squares.append((logits_NE.logsumexp(-1) ** 2 * copies_N1[:, 0]).sum())

    def _zeros(self) -> Tensor:
        """Return a count of 0 for each layer and expert, ``[L, E]``; ``[0, 0]`` for a dense model."""
        routed = self._routed
        shape = (0, 0) if routed is None else (routed.num_layers, routed.num_experts)
        return torch.zeros(shape, dtype=torch.float64)


def _count(counts_E: Tensor, experts_NK: Tensor, copies_N: Tensor) -> None:
    """Add the number of tokens for which each expert was selected to ``counts_E``, in place. ``experts_NK`` are the
    selected experts of each row; row n represents ``copies_N[n]`` tokens."""
    weights_NK = copies_N[:, None].expand(experts_NK.shape).double()
    counts_E.scatter_add_(0, experts_NK.reshape(-1), weights_NK.reshape(-1))


def _copies(micro: MicroBatch, num_rows: int) -> np.ndarray[Any, Any]:
    """Return the number of tokens that each of the ``num_rows`` rows of the pass over ``micro`` represents, ``[N]``. It
    is above 1 for rows that several samples share. For an empty micro-batch it is 0 for all rows."""
    if not len(micro.places_M):
        return np.zeros(num_rows)
    followed_M = np.ones(len(micro.places_M), np.bool_)
    followed_M[np.cumsum(micro.lengths_K) - 1] = False  # a pass does not compute the last token of a sample
    rows_M = np.arange(len(micro.places_M)) if micro.rows_M is None else micro.rows_M
    _, copies_N = np.unique(rows_M[followed_M], return_counts=True)
    return copies_N.astype(np.float64)


def _refuse(config: MixtureConfig, model: nn.Module, routed: RoutedModel | None, *, is_divided: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a model or ranks that do not support the losses or bias
    updates that ``config`` sets. ``routed`` describes the mixture (``None``: the model has none), and ``is_divided``
    says whether ranks divide the tokens of a router or compute the same ones."""
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
    if is_divided:
        raise ConfigError(
            "learner.mixture with learner.parallel.context or tensor above 1: ranks would see parts of a router's "
            "tokens, or the same ones",
            remedy="use learner.parallel.data, replicate and expert, or leave learner.mixture out",
        )


def _has_balance_loss(routed: RoutedModel) -> bool:
    """Return whether transformers defines a balance loss in the module of these routers."""
    kinds = type(routed.layers[0].router).__mro__
    return any(_BALANCE_LOSS in vars(sys.modules[kind.__module__]) for kind in kinds)
