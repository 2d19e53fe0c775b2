"""The optimizer over the parts of the weights that lie on this rank.

    model's weights (bfloat16, sharded) ◀── rounded ── homes (float32, this rank's part, maybe in the host's memory)
         │ backward of one micro-batch                     ▲
         ▼                                                 │ AdamW: number by number; Muon: whole matrices
      p.grad ───────────── collect(): added up ──────▶ home.grad ── clip

Where weights are float32 and stay on the device, a home *is* the weight's memory; in one process, the weight itself,
and nothing has to be collected. AdamW needs nothing of the other
ranks. Muon (Jordan 2024) makes a matrix's update orthogonal, for which that is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from headrace.base.errors import ConfigError
from headrace.learner.config import LearnerConfig
from headrace.learner.optim import build_optimizer
from headrace.learner.parallel.config import MemoryConfig
from headrace.learner.parallel.halves import reshard
from headrace.learner.parallel.mesh import Alone, AnyRanks
from headrace.learner.parallel.shards import copies, like, local, part_of, placed, whole
from headrace.models.weights import DEFAULT, adapter_of, is_adapted, of_adapter

ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("momentum_buffer",)
MASTER = "master"
"""What torch calls the state of each; and the float32 copy of a weight in another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWeight:
    """One weight, and what the optimizer updates in its place."""

    name: str
    weight: Parameter
    home: Parameter
    apart: bool
    """Whether the home has memory of its own."""

    muon: bool
    """Whether it is a matrix for Muon."""
    agent: str = ""
    """Whose adapter it is a part of, where agents train their own."""

    def collect(self) -> None:
        """Move the weight's gradient to its home, added to what is there."""
        if self.weight.grad is None or self.home is self.weight:
            return
        part = local(placed(self.weight.grad, self.weight)).to(device=self.home.device, dtype=self.home.dtype)
        if self.home.grad is None:
            self.home.grad = part
        else:
            self.home.grad.add_(part)
        self.weight.grad = None

    def publish(self) -> None:
        """Round the home into the weight."""
        if self.apart:
            local(self.weight.detach()).copy_(self.home.detach())

    def reread(self) -> None:
        """The weight was changed by someone else."""
        if self.apart:
            self.home.detach().copy_(local(self.weight.detach()))


class ShardOptimizer:
    """AdamW, or Muon for matrices and AdamW for the rest, over every rank's own part. All ranks must call
    :meth:`clip_norms`, :meth:`step` and :meth:`state` together."""

    def __init__(self, model: PreTrainedModel, config: LearnerConfig, ranks: AnyRanks) -> None:
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
        matrices = _matrices(model) if config.optimizer.kind == "muon" else frozenset()
        self.trained = [
            _trained(name, weight, config.memory, muon=name in matrices, alone=isinstance(ranks, Alone))
            for name, weight in model.named_parameters(remove_duplicate=True)
            if weight.requires_grad
        ]
        plain = [one.home for one in self.trained if not one.muon and one.home.numel()]
        self.updates = 0
        """How many times the weights have changed."""
        self.adamw = build_optimizer(plain, config) if plain else None
        """``None`` where this rank has nothing for it."""
        self._momenta: dict[str, dict[str, Tensor]] = {}
        self._momentum = config.optimizer.momentum
        self._weight_decay = config.weight_decay

    @property
    def plain(self) -> bool:
        """Whether it is nothing but torch's AdamW over the weights themselves."""
        return all(one.home is one.weight and not one.muon for one in self.trained)

    @property
    def empty(self) -> bool:
        """Whether there is no gradient."""
        return all(one.home.grad is None for one in self.trained)

    def collect(self) -> None:
        """After each backward pass: add its gradients to those that :meth:`step` will use."""
        for one in self.trained:
            one.collect()

    def clip_norms(self, max_norm: float) -> dict[str, float]:
        """Scale the gradients down to a global norm of ``max_norm``, of each adapter by itself: how large one agent's
        gradient is says nothing of another's step. The norms that they had, by agent; ``""`` is the policy, or all."""
        if isinstance(self._ranks, Alone):
            return {agent: float(clip_grad_norm_(homes, max_norm)) for agent, homes in self._with_gradients().items()}
        norm = self.norm()
        if norm > max_norm:
            self.scale(max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        return {"": norm}

    def _with_gradients(self) -> dict[str, list[Parameter]]:
        """What is clipped together, by agent; without those that have no gradient."""
        found: dict[str, list[Parameter]] = {}
        for one in self.trained:
            if one.home.grad is not None:
                found.setdefault(one.agent, []).append(one.home)
        return found

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        parts = [one.home.grad for one in self.trained if one.home.grad is not None]
        torch._foreach_mul_(parts, factor)

    def norm(self) -> float:
        """Global 2-norm of the gradients; the same on every rank."""
        by_copies: dict[int, list[Tensor]] = {}
        for one in self.trained:
            if one.home.grad is not None:
                by_copies.setdefault(copies(one.weight), []).append(one.home.grad)
        squares = [float(torch.nn.utils.get_total_norm(parts)) ** 2 / count for count, parts in by_copies.items()]
        return math.sqrt(self._ranks.sum(sum(squares)))

    def make_room(self) -> None:
        """Take the memory of all moments that an update is the first to need before it changes any weight; AdamW would
        take it group by group. Whatever this raises, nothing has changed.
        """
        fresh = [one for one in self.trained if one.home.grad is not None and one.home.numel() and not self._held(one)]
        try:
            for one in fresh:
                held = {key: torch.zeros_like(one.home) for key in (MUON if one.muon else ADAMW)}
                self._held(one).update(held if one.muon else {"step": self._count(one, 0), **held})
        except BaseException:
            for one in fresh:
                self._held(one).clear()
            raise

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the weights at rate ``lr`` and forget the gradients. :meth:`make_room` comes first."""
        reshard(self._model)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        for one in self.trained:
            if one.muon and one.home.grad is not None:
                self._orthogonal_step(one, one.home.grad, lr)
        self.updates += 1
        for one in self.trained:
            one.publish()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for one in self.trained:
            one.weight.grad = one.home.grad = None

    def state(self, one: TrainedWeight) -> dict[str, Tensor]:
        """What a snapshot holds of ``one`` beside the weight, as this rank's part of tensors that lie as the weight
        does, under the same keys on every rank; empty before the first update."""
        if not self.updates:
            return {}
        held = self._held(one)  # empty where this rank's part is
        nothing = torch.zeros_like(one.home)
        state = {key: held.get(key, nothing) for key in (MUON if one.muon else ADAMW)}
        if one.apart and one.home.dtype != one.weight.dtype:
            state[MASTER] = one.home.detach()
        device = local(one.weight).device
        return {key: like(tensor.to(device), one.weight) for key, tensor in state.items()}

    @torch.no_grad()
    def set_state(self, one: TrainedWeight, state: Mapping[str, Tensor], updates: int) -> None:
        """Go on after ``updates`` updates with some of what :meth:`state` held, whole. Raises ``ValueError`` for what
        another optimizer held."""
        known = MUON if one.muon else ADAMW
        if strange := sorted(state.keys() - {*known, MASTER}):
            raise ValueError(f"{strange[0]} of {one.name} is another optimizer's")
        self.updates = updates
        parts = {key: part_of(tensor, one.weight).to(one.home.device) for key, tensor in state.items()}
        if MASTER in parts and one.apart:
            one.home.copy_(parts[MASTER])
        if not one.home.numel() or not updates:
            return
        for key, part in parts.items():
            if key in known:
                self._held(one)[key] = part.to(one.home.dtype)
        if not one.muon:
            self._held(one)["step"] = self._count(one, updates)

    def _count(self, one: TrainedWeight, updates: int) -> Tensor:
        return torch.tensor(float(updates), dtype=torch.float32, device=one.home.device)

    def _held(self, one: TrainedWeight) -> dict[str, Tensor]:
        if one.muon:
            return self._momenta.setdefault(one.name, {})
        assert self.adamw is not None
        held: dict[str, Tensor] = self.adamw.state[one.home]
        return held

    def _orthogonal_step(self, one: TrainedWeight, gradient: Tensor, lr: float) -> None:
        """Torch's Muon on the whole matrix, from which every rank takes its part: the result does not depend on them.

        Momentum (Nesterov's) is number by number, so it is kept and computed on the parts; Muon without momentum, at a
        matrix of zeros, then leaves the update itself.
        """
        momentum = self._held(one).setdefault(MUON[0], torch.zeros_like(one.home))
        momentum.lerp_(gradient, 1 - self._momentum)
        wanted = gradient.lerp(momentum, self._momentum).to(local(one.weight).device)
        full = whole(like(wanted, one.weight))
        update = Parameter(torch.zeros_like(full))
        update.grad = full
        torch.optim.Muon(
            [update], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
        one.home.mul_(1 - lr * self._weight_decay).add_(part_of(update.detach(), one.weight).to(one.home.device))


def _trained(name: str, weight: Parameter, memory: MemoryConfig, *, muon: bool, alone: bool) -> TrainedWeight:
    part = local(weight.detach())
    dtype = torch.float32 if memory.masters else part.dtype
    device = torch.device("cpu") if memory.offload_optimizer else part.device
    kept = part.to(device=device, dtype=dtype)
    home = weight if kept is part and alone else Parameter(kept)
    adapter = adapter_of(name) if of_adapter(name) else DEFAULT
    agent = "" if adapter == DEFAULT else adapter
    return TrainedWeight(name=name, weight=weight, home=home, apart=kept is not part, muon=muon, agent=agent)


def _matrices(model: PreTrainedModel) -> frozenset[str]:
    """What Muon is made for: the matrices between the embeddings and the head."""
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    named = model.named_parameters(remove_duplicate=True)
    return frozenset(name for name, weight in named if weight.ndim == 2 and id(weight) not in ends)
