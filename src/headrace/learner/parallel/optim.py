"""The optimizer over the parts of the weights on this rank.

    model's weights (bfloat16, sharded) ◀── rounded ── masters (float32, this rank's part, maybe in host memory)
         │ backward of one micro-batch                     ▲
         ▼                                                 │ AdamW: elementwise; Muon: whole matrices
      p.grad ───────────── collect(): added up ──────▶ master.grad ── clip

Where weights are float32 and stay on the device, a master *is* the weight's memory; in one process, it is the weight
itself, and nothing has to be collected. AdamW needs nothing from the other ranks. Muon (Jordan 2024) makes the update
of a matrix orthogonal, for which all parts of its gradient (with momentum) are gathered.
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
from headrace.learner.config import LearnerConfig
from headrace.learner.optim import build_optimizer, sum_of_squares, update_rules
from headrace.learner.parallel.adapt import parted
from headrace.learner.parallel.config import MemoryConfig
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.parallel.shards import copies, like, local, part_of, placed, whole
from headrace.learner.parallel.split import reshard
from headrace.models.weights import DEFAULT, adapter_of, is_adapted, of_adapter

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("momentum_buffer",)
MASTER = "master"
"""Torch's names of the state of each optimizer, and our name of the float32 copy of a weight in another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeight:
    """One trained weight, and the tensor that the optimizer updates in its place."""

    name: str
    """Name of the parameter in the model."""
    weight: Parameter
    """The parameter with which the model computes."""
    master: Parameter
    """This rank's part of the weight, in the format and on the device in which the optimizer updates it."""
    has_own_memory: bool
    """Whether the master has memory of its own; otherwise it shares the weight's."""

    muon: bool
    """Whether Muon updates it, because it is a matrix."""
    agent: str = ""
    """Agent whose adapter it belongs to, if agents train their own; empty otherwise."""
    summands: int = 0
    """For a weight of an adapter over several ranks, which all hold it whole: by how many the sum of their gradients is
    divided. 0 for other weights, whose gradients torch's sharding sums."""

    def collect(self) -> None:
        """Move the weight's gradient of one backward pass to its master, added to the gradient there. Nothing is done
        if the master is the weight itself."""
        if self.weight.grad is None or self.master is self.weight:
            return
        part = local(placed(self.weight.grad, self.weight)).to(device=self.master.device, dtype=self.master.dtype)
        if self.master.grad is None:
            self.master.grad = part
        else:
            self.master.grad.add_(part)
        self.weight.grad = None

    def publish(self) -> None:
        """Round the master, which an update has changed, into the weight. Nothing is done if both share their
        memory."""
        if self.has_own_memory:
            local(self.weight.detach()).copy_(self.master.detach())

    def refresh_master(self) -> None:
        """Copy the weight into its master, because something other than the optimizer has changed the weight."""
        if self.has_own_memory:
            self.master.detach().copy_(local(self.weight.detach()))


class ShardOptimizer:
    """AdamW, or Muon for matrices and AdamW for the rest, over every rank's own part of the weights. All ranks must
    call :meth:`clip_norms`, :meth:`step` and :meth:`state` together."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, ranks: AnyRanks) -> None:
        """Make the optimizer of all parameters of ``model`` that require gradients. Raises
        :class:`~headrace.base.errors.ConfigError` for settings that the model cannot have."""
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
        """Number of updates made."""
        self._rules = rules
        masters, own = [one.master for one in plain], [rules[one.name] for one in plain]
        self.adamw = build_optimizer(masters, config, own) if plain else None
        """The AdamW optimizer; ``None`` if this rank has no parameters for it."""
        self._low_bit = None if isinstance(self.adamw, torch.optim.AdamW) else self.adamw
        """The AdamW optimizer if its moments have 8 bits; ``None`` for another one."""
        self._momenta: dict[str, dict[str, Tensor]] = {}
        self._momentum = config.optimizer.momentum
        self._summing = model if config.memory.whole_gradients and isinstance(model, FSDPModule) else None
        """The model if torch is to sum its gradients over the ranks after the last micro-batch only."""
        self._summed = False
        """Whether the gradients of adapters have been summed over the ranks since they were last discarded."""

    @property
    def plain(self) -> bool:
        """Return whether the optimizer is only AdamW over the weights themselves, without masters of their own memory
        and without Muon. Such a state is written in torch's own form."""
        return all(one.master is one.weight and not one.muon for one in self.trained)

    @property
    def empty(self) -> bool:
        """Return whether there is no gradient for the next update."""
        return all(one.master.grad is None for one in self.trained)

    def expect(self, *, last: bool) -> None:
        """Prepare for the pass of a micro-batch, which is the ``last`` of a batch or not."""
        if self._summing is not None:
            self._summing.set_requires_gradient_sync(last)

    def collect(self) -> None:
        """Move the gradients of a backward pass to the masters, added to those that :meth:`step` will use."""
        assert not self._summed, "this gradient would be added to one that has been summed over the ranks"
        for one in self.trained:
            one.collect()

    def clip_norms(self, max_norm: float) -> dict[str, float]:
        """Sum the gradients of adapters over the ranks. Then scale all gradients down to a global norm of ``max_norm``,
        separately for each adapter, because the size of one agent's gradient must not affect another's step. Return the
        norms before scaling, by agent; ``""`` is the policy, or all weights."""
        self._sum_adapters()
        norms: dict[str, float] = {}
        for agent, those in self._by_agent().items():
            norm = norms[agent] = self._norm(those)
            if norm > max_norm:
                torch._foreach_mul_(_gradients(those), _clip_factor(norm, max_norm))
        return norms

    def _by_agent(self) -> dict[str, list[TrainedWeight]]:
        """Return the weights that have a gradient by the agent whose adapter they belong to. The gradients of one agent
        are clipped to one common norm. Every rank returns the same agents, the policy among them in any case."""
        found: dict[str, list[TrainedWeight]] = {"": []}
        for one in self.trained:
            if one.master.grad is not None:
                found.setdefault(one.agent, []).append(one)
        return found

    def _sum_adapters(self) -> None:
        """Sum the gradients of adapters over the ranks, in one message, unless that has been done. Every rank has added
        up those of its own tokens, because torch's sharding knows nothing of adapters. A weight that no token of any
        rank has used, as may be with experts, keeps no gradient, as in one process."""
        with_gradient = {one.agent for one in self.trained if one.summands and one.master.grad is not None}
        if not with_gradient or self._summed:
            return
        self._summed = True
        those = [one for one in self.trained if one.agent in with_gradient]
        parts = [
            torch.zeros_like(one.master) if one.master.grad is None else one.master.grad / one.summands for one in those
        ]
        has_one = torch.tensor([float(one.master.grad is not None) for one in those])
        flat = torch.cat([*(part.reshape(-1) for part in parts), has_one.to(parts[0])])
        *summed, used = self._ranks.add_up(flat).split([*(part.numel() for part in parts), len(those)])
        for one, total, count in zip(those, summed, used.tolist(), strict=True):
            one.master.grad = total.view_as(one.master) if count else None

    def scale(self, factor: float) -> None:
        """Multiply the gradients that were collected by ``factor``."""
        torch._foreach_mul_(_gradients(self.trained), factor)

    def norm(self) -> float:
        """Return the global 2-norm of the gradients, the same on every rank."""
        self._sum_adapters()
        return self._norm(self.trained)

    def _norm(self, those: Sequence[TrainedWeight]) -> float:
        """Return the common 2-norm of the gradients of these weights, the same on every rank."""
        by_copies: dict[int, list[Tensor]] = {}
        for one in those:
            by_copies.setdefault(copies(one.weight, self._ranks.config.world), []).extend(_gradients([one]))
        squares = [sum_of_squares(parts) / count for count, parts in by_copies.items()]
        return math.sqrt(self._ranks.sum(sum(squares)))

    def allocate(self) -> None:
        """Allocate all moments that the first update needs before it changes any weight; AdamW would allocate them
        group by group. If it raises, nothing has changed."""
        fresh = [
            one for one in self.trained if one.master.grad is not None and one.master.numel() and not self._held(one)
        ]
        try:
            for one in fresh:
                held = self._zeros(one)
                self._held(one).update(held if one.muon else {"step": self._count(one, 0), **held})
        except BaseException:
            for one in fresh:
                self._held(one).clear()
            raise

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights at rate ``lr`` and discard the gradients. :meth:`allocate` must be called before."""
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
        self._summed = False
        for one in self.trained:
            one.weight.grad = one.master.grad = None

    def state(self, one: TrainedWeight) -> dict[str, Tensor]:
        """Return the state of ``one`` in a snapshot beside the weight, sharded like the weight, under the same keys on
        every rank; empty before the first update."""
        device = local(one.weight).device
        return {key: like(tensor.to(device), one.weight) for key, tensor in self.parts(one).items()}

    def parts(self, one: TrainedWeight) -> dict[str, Tensor]:
        """Return this rank's parts of the tensors of :meth:`state`, under the same keys, on the device on which the
        optimizer keeps them. All but those of 8 bits share its memory."""
        if not self.updates:
            return {}
        held = self._held(one) or self._zeros(one)  # empty where this rank's part is
        state = {key: held[key] for key in (MUON if one.muon else ADAMW)}
        if self._low_bit is not None:
            state = self._low_bit.plain(state)
        if one.has_own_memory and one.master.dtype != one.weight.dtype:
            state[MASTER] = one.master.detach()
        return state

    @torch.no_grad()
    def set_state(self, one: TrainedWeight, state: Mapping[str, Tensor | SavedTensor], updates: int) -> None:
        """Restore some of the tensors that :meth:`state` returned, given whole or as saved tensors, of which this
        rank's part is read, after ``updates`` updates. Raises ``ValueError`` for the state of another optimizer, and
        what :meth:`SavedTensor.read` raises."""
        known = MUON if one.muon else ADAMW
        if self._low_bit is None and (strange := sorted(state.keys() - {*known, MASTER})):
            raise ValueError(f"{strange[0]} of {one.name} is another optimizer's")
        self.updates = updates
        parts = {key: self._part(tensor, one).to(one.master.device) for key, tensor in state.items()}
        if MASTER in parts and one.has_own_memory:
            one.master.copy_(parts[MASTER])
        if not one.master.numel() or not updates:
            return
        if self._low_bit is not None:
            held = self._held(one)
            held.update({} if held else self._zeros(one))
            self._low_bit.fill(held, {key: part for key, part in parts.items() if key != MASTER})
        else:
            self._held(one).update({key: part.to(one.master.dtype) for key, part in parts.items() if key in known})
        if not one.muon:
            self._held(one)["step"] = self._count(one, updates)

    def _part(self, tensor: Tensor | SavedTensor, one: TrainedWeight) -> Tensor:
        """Return this rank's part of one tensor of a weight's state. Codes and scales of 8 bits, on one rank, have
        shapes of their own."""
        if self._low_bit is not None and isinstance(tensor, SavedTensor):
            return tensor.whole()
        return part_of(tensor, one.weight)

    def _zeros(self, one: TrainedWeight) -> dict[str, Tensor]:
        """Return the optimizer's state of a weight before its first update: AdamW's moments, or Muon's momentum, of
        zeros."""
        if self._low_bit is not None:
            return self._low_bit.moments(one.master)
        return {key: torch.zeros_like(one.master) for key in (MUON if one.muon else ADAMW)}

    def _count(self, one: TrainedWeight, updates: int) -> Tensor:
        """Return the number of ``updates`` as the tensor in which AdamW counts them."""
        return torch.tensor(float(updates), dtype=torch.float32, device=one.master.device)

    def _held(self, one: TrainedWeight) -> dict[str, Tensor]:
        """Return the optimizer's state of a weight on this rank, which the caller may change in place: its momentum
        under Muon, its moments under AdamW; empty before it is allocated."""
        if one.muon:
            return self._momenta.setdefault(one.name, {})
        assert self.adamw is not None
        held: dict[str, Tensor] = self.adamw.state[one.master]
        return held

    def _orthogonal_step(self, one: TrainedWeight, gradient: Tensor, lr: float) -> None:
        """Make one update of the matrix ``one`` by Muon, with decoupled weight decay. ``gradient`` is this rank's part
        of the gradient. ``lr`` is the rate of all weights, which the rule of this weight scales. Every rank applies
        torch's Muon to the whole matrix and uses its own part of the update, so that the result does not depend on how
        the matrix is sharded.

        Nesterov momentum is elementwise, so each rank keeps and computes only its own part of it. Torch's Muon is then
        applied, without momentum, to a matrix of zeros, which thereby becomes the update itself.
        """
        rule = self._rules[one.name]
        lr *= rule.lr_scale
        momentum = self._held(one).setdefault(MUON[0], torch.zeros_like(one.master))
        momentum.lerp_(gradient, 1 - self._momentum)
        wanted = gradient.lerp(momentum, self._momentum).to(local(one.weight).device)
        full = whole(like(wanted, one.weight))
        update = Parameter(torch.zeros_like(full))
        update.grad = full
        torch.optim.Muon(
            [update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
        one.master.mul_(1 - lr * rule.weight_decay).add_(part_of(update.detach(), one.weight).to(one.master.device))


def _gradients(those: Sequence[TrainedWeight]) -> list[Tensor]:
    """Return the gradients of these weights, as far as they have one."""
    return [one.master.grad for one in those if one.master.grad is not None]


def _clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that scales gradients of ``norm`` down to ``max_norm``, as torch's ``clip_grad_norm_``."""
    return max_norm / (norm + 1e-6)


def _trained_weights(
    model: PreTrainedModel, memory: MemoryConfig, matrices: frozenset[str], ranks: AnyRanks
) -> list[TrainedWeight]:
    """Return the record of each trained weight of ``model``; Muon updates those in ``matrices``."""
    parallel, found = ranks.config, list[TrainedWeight]()
    parts = parted(model) if parallel.tensor > 1 and is_adapted(model) else frozenset[str]()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        copied = 1 if name in parts else parallel.tensor
        summands = copied * parallel.num_averaged if of_adapter(name) and parallel.world > 1 else 0
        found.append(
            _trained(name, weight, memory, muon=name in matrices, summands=summands, alone=parallel.world == 1)
        )
    return found


def _trained(
    name: str, weight: Parameter, memory: MemoryConfig, *, muon: bool, summands: int, alone: bool
) -> TrainedWeight:
    """Return the record of a trained weight, with a master copy where the memory settings ask for one. ``alone`` says
    that there is a single rank. There, and where every rank has the whole weight of an adapter, the master may be the
    weight itself. ``muon`` says that Muon updates the weight; see :class:`TrainedWeight` for ``summands``."""
    part = local(weight.detach())
    dtype = torch.float32 if memory.masters else part.dtype
    device = torch.device("cpu") if memory.offload_optimizer else part.device
    kept = part.to(device=device, dtype=dtype)
    master = weight if kept is part and (alone or summands) else Parameter(kept)
    adapter = adapter_of(name) if of_adapter(name) else DEFAULT
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
    """Return the weights of both ends of the model by name: ``embeddings``, and ``head`` unless it is the same
    weight."""
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    found = {name: end.weight for name, end in ends.items() if end is not None}
    if found.get("head") is found.get("embeddings"):
        found.pop("head", None)
    return found


def _matrices(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the matrices that Muon updates: those between the embeddings and the head."""
    ends = {id(weight) for weight in _ends(model).values()}
    named = model.named_parameters(remove_duplicate=True)
    return frozenset(name for name, weight in named if weight.ndim == 2 and id(weight) not in ends)
