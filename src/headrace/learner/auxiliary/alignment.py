"""The auxiliary model that keeps the gradients of the last update, and changes those of the next by their alignment.

The formula is in :mod:`headrace.learner.alignment`. The gradients are those of the optimizer's masters, in their dtype
and on their device, and each rank keeps its own shards, so that this needs the memory of one more gradient. Each
agent's adapter is compared with its own last gradient, which may be several steps old. The critic is not compared.

    gradient g, kept h ──▶ g·g, g·h, h·h over all ranks ──┬─ safe, or there is no h    h ← g
                                                          ├─ projection                g, h ← g + a·h, g
                                                          └─ skip                      g, h ← nothing, g
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headrace.learner.alignment import AlignmentConfig, AlignmentDecision
from headrace.learner.auxiliary.base import AuxiliaryModel, LearnerParts
from headrace.learner.parallel.optim import TrainedWeight
from headrace.learner.parallel.parts import SavedTensor
from headrace.learner.parallel.shards import local_shard, slice_shard, wrap_shard

_COUNT = "gradients"
"""The name of the number of gradients in a snapshot. It is there before the first update, too, so that such a snapshot
differs from one of a run without these settings."""


class GradientAlignment(AuxiliaryModel):
    """The control of the alignment of consecutive gradients. It computes no column."""

    name: ClassVar[str] = "alignment"
    prepares: ClassVar[bool] = False

    def __init__(self, parts: LearnerParts, config: AlignmentConfig) -> None:
        """Keep the gradients of the learner with these ``parts``, and change them as ``config`` sets."""
        self._config = config
        self._optimizer = parts.optimizer
        self._agents = parts.forward.switch.agents[1:]
        """The agents that train adapters of their own, whose metrics have their names."""
        self._earlier: dict[str, Tensor] = {}
        """This rank's shard of the last gradient of each weight, by the weight's name. Of an agent's weights, either
        all have one, or none if there was no update of them."""
        self._has_changed = False
        """Whether :attr:`_earlier` is already the gradient of an update that has not been completed."""

    @torch.no_grad()
    def before_clip(self) -> dict[str, float]:
        """Compare the gradient of each agent's weights with their last one, change it, and keep it for the next update.
        Return the cosines and what was done. A gradient of zeros has no direction, and is neither compared nor kept."""
        found = {agent: each for agent, each in self._optimizer.products(self._earlier).items() if each.own}
        if not all(math.isfinite(each.own) for each in found.values()):
            return {}  # the learner refuses this update
        self._has_changed = True
        metrics: dict[str, float] = {}
        for agent, products in found.items():
            decision = self._config.decide(products)
            for one in self._optimizer.trained:
                if one.agent == agent:
                    self._change(one, decision)
            if products.earlier:
                prefix = f"agent/{agent}/" if agent in self._agents else ""
                metrics[f"{prefix}grad_alignment"] = products.cosine
                metrics[f"{prefix}grad_projected"] = float(decision.added != 0)
                metrics[f"{prefix}grad_skipped"] = float(decision.skipped)
        return metrics

    def _change(self, one: TrainedWeight, decision: AlignmentDecision) -> None:
        """Change the gradient of one weight, and keep what it was. The kept gradient and the changed one exchange their
        memory, so that none is needed."""
        earlier = self._earlier.get(one.name)
        gradient = torch.zeros_like(one.master) if one.master.grad is None else one.master.grad
        if decision.skipped:
            self._earlier[one.name], one.master.grad = gradient, None
        elif earlier is None:
            self._earlier[one.name] = gradient.clone()
        elif decision.added:
            self._earlier[one.name] = gradient
            one.master.grad = torch.add(gradient, earlier, alpha=decision.added, out=earlier)
        else:
            earlier.copy_(gradient)

    def after_update(self, version: int) -> None:
        """Confirm that the kept gradient is that of an update."""
        self._has_changed = False

    def discard_gradient(self) -> None:
        """Forget the kept gradients if they are those of the failed update, which may be tried again: it would be
        compared with itself."""
        if self._has_changed:
            self._earlier.clear()
        self._has_changed = False

    def state(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the number of the kept gradients, and each by its weight's name, sharded over the ranks like the
        weight."""
        yield _COUNT, torch.tensor([len(self._earlier)])
        for one in self._optimizer.trained:
            if (part := self._earlier.get(one.name)) is not None:
                yield one.name, wrap_shard(part.to(local_shard(one.weight).device), one.weight)

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Tensor | SavedTensor]) -> None:
        """Restore this rank's shards of the gradients that :meth:`state` yielded. Raises ``KeyError`` or ``ValueError``
        for the state of another model."""
        count = int(slice_shard(state[_COUNT], torch.zeros(1)))
        named = {one.name: one for one in self._optimizer.trained if one.name in state}
        if not count == len(named) == len(state) - 1:
            raise ValueError(f"it holds {len(state) - 1} of {count} gradients, {len(named)} of them of trained weights")
        self._earlier = {name: _read(state[name], one) for name, one in named.items()}


def _read(saved: Tensor | SavedTensor, one: TrainedWeight) -> Tensor:
    """Return this rank's shard of the gradient ``saved`` of a weight, in memory of its own. Raises ``ValueError`` for
    another shape."""
    if saved.shape != one.weight.shape:
        raise ValueError(f"{one.name} is {list(saved.shape)}, expected {list(one.weight.shape)}")
    return slice_shard(saved, one.weight).to(one.master.device, one.master.dtype, copy=True)
