"""The optimizer of a learner, over this rank's shards of the weights.

    model's weights (bfloat16, sharded) ◀── rounded ── masters (float32, this rank's shard, maybe in host memory)
         │ backward of one micro-batch                     ▲
         ▼                                                 │ AdamW: elementwise; Muon: whole matrices
      p.grad ───────────── collect(): accumulated ───▶ master.grad ── clip

A *master* is the float32 tensor that the optimizer updates for a weight. For float32 weights that stay on the device, a
master shares the weight's memory; in one process, it is the weight itself, and gradients need not be collected. AdamW
is elementwise and needs no communication. Muon (Jordan 2024) makes the update of a matrix orthogonal, for which the
parts of the gradient (with momentum) are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.learner.alignment import GradientProducts
from headrace.learner.config import LearnerConfig
from headrace.learner.optim import build_optimizer, inner_product, sum_of_squares, update_rules
from headrace.learner.parallel.adapt import parted
from headrace.learner.parallel.config import MemoryConfig
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.parallel.shards import (
    gather_whole,
    local_shard,
    num_replicas,
    reshard_like,
    slice_shard,
    wrap_shard,
)
from headrace.learner.parallel.split import reshard
from headrace.models.weights import DEFAULT, belongs_to_adapter, is_adapted, parse_adapter_name

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("momentum_buffer",)
MASTER = "master"
"""The keys of an optimizer's state: torch's names for AdamW and Muon, and our name for the master of a weight in
another dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeight:
    """One trained weight and its master, the tensor that the optimizer updates."""

    name: str
    """The name of the parameter in the model."""
    weight: Parameter
    """The parameter with which the model computes."""
    master: Parameter
    """This rank's part of the weight, in the dtype and on the device in which the optimizer updates it."""
    has_own_memory: bool
    """Whether the master has memory of its own; otherwise it shares the weight's memory."""

    muon: bool
    """Whether Muon updates the weight, because it is a matrix."""
    agent: str = ""
    """The agent whose adapter contains the weight, if agents train adapters of their own; else empty."""
    summands: int = 0
    """For an adapter's weight with several ranks, all of which have it whole: the number by which the sum of their
    gradients is divided. 0 for other weights, whose gradients torch's sharding reduces."""

    def collect(self) -> None:
        """Add the weight's gradient of one backward pass to the master's gradient, in the dtype and on the device of
        the master, and remove it from the weight. Do nothing if the weight has no gradient, or if the master is the
        weight itself."""
        if self.weight.grad is None or self.master is self.weight:
            return
        shard = local_shard(reshard_like(self.weight.grad, self.weight)).to(
            device=self.master.device, dtype=self.master.dtype
        )
        if self.master.grad is None:
            self.master.grad = shard
        else:
            self.master.grad.add_(shard)
        self.weight.grad = None

    def publish(self) -> None:
        """Copy the updated master into the weight, rounded to the weight's dtype. If they share their memory, do
        nothing."""
        if self.has_own_memory:
            local_shard(self.weight.detach()).copy_(self.master.detach())

    def refresh_master(self) -> None:
        """Copy the weight into its master, after the weight was changed by other code than the optimizer."""
        if self.has_own_memory:
            self.master.detach().copy_(local_shard(self.weight.detach()))


class ShardOptimizer:
    """The optimizer: AdamW for all weights, or Muon for matrices and AdamW for other weights. Each rank updates its own
    parts of the weights. All ranks must call :meth:`clip_norms`, :meth:`step` and :meth:`state` together."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, ranks: AnyRanks) -> None:
        """Create the optimizer of all parameters of ``model`` that require gradients, whose shards are on ``ranks``.
        Raises :class:`~headrace.base.errors.ConfigError` for settings that do not apply to the model."""
        self._model = model
        self._ranks = ranks
        if config.optimizer.kind == "muon" and is_adapted(model):
            raise ConfigError(
                "learner.optimizer.kind='muon' is made for whole matrices, and an adapter trains factors of them",
                remedy="set learner.optimizer.kind = 'adamw', or leave [model.lora] out",
            )
        if config.memory.offload_optimizer and is_adapted(model):
            raise ConfigError(
                "learner.memory.offload_optimizer=true: an adapter's optimizer is too small to be worth moving",
                remedy="leave learner.memory.offload_optimizer out, or [model.lora]",
            )
        if config.memory.whole_gradients and is_adapted(model):
            raise ConfigError(
                "learner.memory.whole_gradients=true has no effect on an adapter: its gradients are summed once anyway",
                remedy="leave learner.memory.whole_gradients out, or [model.lora]",
            )
        matrices = _matrices(model) if config.optimizer.kind == "muon" else frozenset()
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        rules = update_rules(named, config, **_ends(model))
        self.trained = _trained_weights(model, config.memory, matrices, ranks)
        plain = [one for one in self.trained if not one.muon and one.master.numel()]
        self.updates = 0
        """The number of updates so far."""
        self._rules = rules
        masters, own = [one.master for one in plain], [rules[one.name] for one in plain]
        self.adamw = build_optimizer(masters, config, own) if plain else None
        """The AdamW optimizer; ``None`` if this rank has no parameters for it."""
        self._low_bit = None if isinstance(self.adamw, torch.optim.AdamW) else self.adamw
        """The AdamW optimizer if its moments have 8 bits; else ``None``."""
        self._momenta: dict[str, dict[str, Tensor]] = {}
        """The momentum of each matrix that Muon updates, by the weight's name."""
        self._momentum = config.optimizer.momentum
        self._model_reduced_once = model if config.memory.whole_gradients and isinstance(model, FSDPModule) else None
        """The model if torch should reduce its gradients over the ranks only after the last micro-batch; else
        ``None``."""
        self._has_summed_adapters = False
        """Whether the present gradients of adapters have been summed over the ranks."""

    @property
    def plain(self) -> bool:
        """Return whether the optimizer is only AdamW over the weights themselves, without separate masters and without
        Muon. The state of such an optimizer is saved in torch's own form."""
        return all(one.master is one.weight and not one.muon for one in self.trained)

    @property
    def empty(self) -> bool:
        """Return whether there is no gradient for the next update."""
        return all(one.master.grad is None for one in self.trained)

    def expect(self, *, last: bool) -> None:
        """Prepare for the pass of a micro-batch. ``last`` says whether it is the last one of a batch."""
        if self._model_reduced_once is not None:
            self._model_reduced_once.set_requires_gradient_sync(last)

    def collect(self) -> None:
        """Add the gradients of a backward pass to those of the masters, which :meth:`step` uses, and remove them from
        the weights. Call it once after each backward pass, and before :meth:`clip_norms`."""
        assert not self._has_summed_adapters, "this gradient would be added to one that has been summed over the ranks"
        for one in self.trained:
            one.collect()

    def clip_norms(self, max_norm: float) -> dict[str, float]:
        """Sum the gradients of adapters over the ranks. Then clip the gradients to the global norm ``max_norm``,
        separately for each agent's adapter, so that the gradient of one agent does not affect the update of another.
        Return the norms before clipping, by agent; the empty name is the policy, or all weights."""
        self._sum_adapters()
        norms: dict[str, float] = {}
        for agent, weights in self._by_agent().items():
            norm = norms[agent] = self._norm(weights)
            if norm > max_norm:
                torch._foreach_mul_(_gradients(weights), _clip_factor(norm, max_norm))
        return norms

    def _by_agent(self) -> dict[str, list[TrainedWeight]]:
        """Return the weights that have a gradient, by the agent whose adapter contains them. Every rank returns the
        same agents, and always the policy (the empty name)."""
        found: dict[str, list[TrainedWeight]] = {"": []}
        for one in self.trained:
            if one.master.grad is not None:
                found.setdefault(one.agent, []).append(one)
        return found

    def _sum_adapters(self) -> None:
        """Sum the gradients of adapters over the ranks, in one message, unless they have been summed already. Torch's
        sharding does not include adapters, so each rank has accumulated the gradients of its own tokens. A weight
        without a gradient on any rank, such as of an unused expert, has none afterwards, as in one process."""
        with_gradient = {one.agent for one in self.trained if one.summands and one.master.grad is not None}
        if not with_gradient or self._has_summed_adapters:
            return
        self._has_summed_adapters = True
        weights = [one for one in self.trained if one.agent in with_gradient]
        parts = [
            torch.zeros_like(one.master) if one.master.grad is None else one.master.grad / one.summands
            for one in weights
        ]
        has_one = torch.tensor([float(one.master.grad is not None) for one in weights])
        flat = torch.cat([*(part.reshape(-1) for part in parts), has_one.to(parts[0])])
        *summed, used = self._ranks.add_up(flat).split([*(part.numel() for part in parts), len(weights)])
        for one, total, count in zip(weights, summed, used.tolist(), strict=True):
            one.master.grad = total.view_as(one.master) if count else None

    def scale(self, factor: float) -> None:
        """Multiply the accumulated gradients by ``factor``."""
        torch._foreach_mul_(_gradients(self.trained), factor)

    def norm(self) -> float:
        """Return the global 2-norm of the gradients, the same on every rank."""
        self._sum_adapters()
        return self._norm(self.trained)

    def _norm(self, weights: Sequence[TrainedWeight]) -> float:
        """Return the 2-norm of the gradients of ``weights`` together, the same on every rank."""
        by_copies: dict[int, list[Tensor]] = {}
        for one in weights:
            by_copies.setdefault(num_replicas(one.weight, self._ranks.config.world), []).extend(_gradients([one]))
        squares = [sum_of_squares(parts) / count for count, parts in by_copies.items()]
        return math.sqrt(self._ranks.sum(sum(squares)))

    def products(self, earlier: Mapping[str, Tensor]) -> dict[str, GradientProducts]:
        """Sum the gradients of adapters over the ranks. Then return the inner products of the gradients and of
        ``earlier``, this rank's shards of other gradients by the weights' names: over all weights of each agent's
        adapter, by agent, or under the empty name. They are the same on every rank. A missing gradient counts as
        zeros."""
        self._sum_adapters()
        agents = list(self._by_agent())
        shares = [self._products([one for one in self.trained if one.agent == agent], earlier) for agent in agents]
        sums = self._ranks.add_up(torch.tensor(shares, dtype=torch.float64)).tolist()
        return {agent: GradientProducts(*row) for agent, row in zip(agents, sums, strict=True)}

    def _products(self, weights: Sequence[TrainedWeight], earlier: Mapping[str, Tensor]) -> list[float]:
        """Return this rank's share of the inner products g·g, g·h and h·h, where g are the gradients of ``weights``,
        and h those in ``earlier``."""
        terms: tuple[list[Tensor], ...] = ([], [], [])
        for one in weights:
            own, other = one.master.grad, earlier.get(one.name)
            copies = num_replicas(one.weight, self._ranks.config.world)
            for found, first, second in zip(terms, (own, own, other), (own, other, other), strict=True):
                if first is not None and second is not None:
                    found.append(inner_product(first, second) / copies)
        return [float(torch.stack(found).sum()) if found else 0.0 for found in terms]

    def allocate(self) -> None:
        """Allocate all moments for the first update, since AdamW would allocate them group by group during the update.
        On failure, nothing has changed."""
        fresh = [
            one
            for one in self.trained
            if one.master.grad is not None and one.master.numel() and not self._get_state(one)
        ]
        try:
            for one in fresh:
                optimizer_state = self._zeros(one)
                self._get_state(one).update(
                    optimizer_state if one.muon else {"step": self._count(one, 0), **optimizer_state}
                )
        except BaseException:
            for one in fresh:
                self._get_state(one).clear()
            raise

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights with the learning rate ``lr``, and discard the gradients. :meth:`allocate` must be called
        before."""
        reshard(self._model)
        if self._low_bit is not None:
            self._low_bit.set_rates(lr)
        elif self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = lr * group["lr_scale"]
        if self.adamw is not None:
            self.adamw.step()
        for one in self.trained:
            if one.muon and one.master.grad is not None:
                self._orthogonal_step(one, one.master.grad, lr)
        self.updates += 1
        for one in self.trained:
            one.publish()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Discard the gradients of the weights and of their masters."""
        self._has_summed_adapters = False
        for one in self.trained:
            one.weight.grad = one.master.grad = None

    def state(self, record: TrainedWeight) -> dict[str, Tensor]:
        """Return the optimizer's state of the weight ``record`` for a snapshot, sharded like the weight, with the same
        keys on every rank; empty before the first update."""
        device = local_shard(record.weight).device
        return {key: wrap_shard(tensor.to(device), record.weight) for key, tensor in self.parts(record).items()}

    def parts(self, record: TrainedWeight) -> dict[str, Tensor]:
        """Return this rank's shards of the state of the weight ``record``, as :meth:`state` returns it, with the same
        keys, on the device on which the optimizer keeps them. They share the optimizer's memory, except moments of 8
        bits."""
        if not self.updates:
            return {}
        optimizer_state = self._get_state(record) or self._zeros(record)  # empty tensors if this rank's shard is empty
        state = {key: optimizer_state[key] for key in (MUON if record.muon else ADAMW)}
        if self._low_bit is not None:
            state = self._low_bit.plain(state)
        if record.has_own_memory and record.master.dtype != record.weight.dtype:
            state[MASTER] = record.master.detach()
        return state

    @torch.no_grad()
    def set_state(self, record: TrainedWeight, state: Mapping[str, Tensor | SavedTensor], updates: int) -> None:
        """Restore some of the tensors that :meth:`state` returned for the weight ``record`` after ``updates`` updates.
        ``state`` contains whole tensors, or saved tensors, of which this rank's shard is read. Raises ``ValueError``
        for the state of another optimizer, and the same errors as :meth:`SavedTensor.read`."""
        known = MUON if record.muon else ADAMW
        if self._low_bit is None and (strange := sorted(state.keys() - {*known, MASTER})):
            raise ValueError(f"{strange[0]} of {record.name} is another optimizer's")
        self.updates = updates
        parts = {key: self._part(tensor, record).to(record.master.device) for key, tensor in state.items()}
        if MASTER in parts and record.has_own_memory:
            record.master.copy_(parts[MASTER])
        if not record.master.numel() or not updates:
            return
        if self._low_bit is not None:
            optimizer_state = self._get_state(record)
            optimizer_state.update({} if optimizer_state else self._zeros(record))
            self._low_bit.fill(optimizer_state, {key: part for key, part in parts.items() if key != MASTER})
        else:
            self._get_state(record).update(
                {key: part.to(record.master.dtype) for key, part in parts.items() if key in known}
            )
        if not record.muon:
            self._get_state(record)["step"] = self._count(record, updates)

    def _part(self, tensor: Tensor | SavedTensor, record: TrainedWeight) -> Tensor:
        """Return this rank's shard of one tensor of a weight's state. Codes and scales of 8-bit moments are whole,
        since they are used with one rank only, and their shapes differ from the weight's."""
        if self._low_bit is not None and isinstance(tensor, SavedTensor):
            return tensor.whole()
        return slice_shard(tensor, record.weight)

    def _zeros(self, record: TrainedWeight) -> dict[str, Tensor]:
        """Return the optimizer's state of a weight before its first update: zeros for AdamW's moments, or for Muon's
        momentum."""
        if self._low_bit is not None:
            return self._low_bit.moments(record.master)
        return {key: torch.zeros_like(record.master) for key in (MUON if record.muon else ADAMW)}

    def _count(self, record: TrainedWeight, updates: int) -> Tensor:
        """Return ``updates`` as the tensor in which AdamW stores the number of updates."""
        return torch.tensor(float(updates), dtype=torch.float32, device=record.master.device)

    def _get_state(self, record: TrainedWeight) -> dict[str, Tensor]:
        """Return the optimizer's state of a weight on this rank, which the caller may change in place: the momentum of
        Muon or the moments of AdamW; empty before it is allocated."""
        if record.muon:
            return self._momenta.setdefault(record.name, {})
        assert self.adamw is not None
        optimizer_state: dict[str, Tensor] = self.adamw.state[record.master]
        return optimizer_state

    def _orthogonal_step(self, record: TrainedWeight, gradient: Tensor, lr: float) -> None:
        """Update the matrix ``record`` by Muon, with decoupled weight decay. ``gradient`` is this rank's shard of the
        gradient. ``lr`` is the common learning rate, which is scaled by this weight's rule. Every rank applies torch's
        Muon to the whole matrix and uses its own part of the result, which therefore does not depend on the sharding.

        Nesterov momentum is elementwise, so each rank computes only its own part of it. Torch's Muon is then applied,
        without momentum, to a matrix of zeros, whose new value is the update.
        """
        rule = self._rules[record.name]
        lr *= rule.lr_scale
        momentum = self._get_state(record).setdefault(MUON[0], torch.zeros_like(record.master))
        momentum.lerp_(gradient, 1 - self._momentum)
        nesterov = gradient.lerp(momentum, self._momentum).to(local_shard(record.weight).device)
        full = gather_whole(wrap_shard(nesterov, record.weight))
        update = Parameter(torch.zeros_like(full))
        update.grad = full
        torch.optim.Muon(
            [update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
        record.master.mul_(1 - lr * rule.weight_decay).add_(
            slice_shard(update.detach(), record.weight).to(record.master.device)
        )


def _gradients(weights: Sequence[TrainedWeight]) -> list[Tensor]:
    """Return the gradients of ``weights``, without the weights that have none."""
    return [one.master.grad for one in weights if one.master.grad is not None]


def _clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips gradients with the norm ``norm`` to ``max_norm``, as in torch's
    ``clip_grad_norm_``."""
    return max_norm / (norm + 1e-6)


def _trained_weights(
    model: PreTrainedModel, memory: MemoryConfig, matrices: frozenset[str], ranks: AnyRanks
) -> list[TrainedWeight]:
    """Return a record for each trained weight of ``model`` under the settings ``memory``, sharded over ``ranks``;
    ``matrices`` are the names of weights that Muon updates."""
    parallel, found = ranks.config, list[TrainedWeight]()
    parts = parted(model) if parallel.tensor > 1 and is_adapted(model) else frozenset[str]()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        num_equal = 1 if name in parts else parallel.tensor
        summands = num_equal * parallel.num_averaged if belongs_to_adapter(name) and parallel.world > 1 else 0
        found.append(
            _trained_weight(name, weight, memory, muon=name in matrices, summands=summands, alone=parallel.world == 1)
        )
    return found


def _trained_weight(
    name: str, weight: Parameter, memory: MemoryConfig, *, muon: bool, summands: int, alone: bool
) -> TrainedWeight:
    """Return the record of the trained weight ``name``, with a separate master if the memory settings require one. With
    a single rank (``alone``), and for a weight of an adapter, which every rank has whole, the master may be the weight
    itself. For ``muon`` and ``summands`` see :class:`TrainedWeight`."""
    part = local_shard(weight.detach())
    dtype = torch.float32 if memory.masters else part.dtype
    device = torch.device("cpu") if memory.offload_optimizer else part.device
    kept = part.to(device=device, dtype=dtype)
    master = weight if kept is part and (alone or summands) else Parameter(kept)
    adapter = parse_adapter_name(name) if belongs_to_adapter(name) else DEFAULT
    return TrainedWeight(
        name=name,
        weight=weight,
        master=master,
        has_own_memory=kept is not part,
        muon=muon,
        agent="" if adapter == DEFAULT else adapter,
        summands=summands,
    )


def _ends(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights ``embeddings`` and ``head`` of the model, by these names; without ``head`` if both are the
    same weight."""
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    found = {name: end.weight for name, end in ends.items() if end is not None}
    if found.get("head") is found.get("embeddings"):
        found.pop("head", None)
    return found


def _matrices(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the matrices that Muon updates: all matrices except the embeddings and the head."""
    ends = {id(weight) for weight in _ends(model).values()}
    named = model.named_parameters(remove_duplicate=True)
    return frozenset(name for name, weight in named if weight.ndim == 2 and id(weight) not in ends)
