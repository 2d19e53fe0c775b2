"""One model in training (a tenant): its weights, gradients, optimizer and version. The weights are an adapter, or all
weights of a base model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import RunError
from headrace.learner.optim import FUSED_DEVICES, sum_of_squares
from headrace.wings.tinker.files import WeightState
from headrace.wings.tinker.schema import AdamBody
from headrace.wings.tinker.weights import Weights

_FIRST, _SECOND, _STEPS, _GRADIENT = "exp_avg/", "exp_avg_sq/", "step/", "gradient/"


class Tenant:
    """The training state of one model, in memory. It is not thread-safe.

    The optimizer is torch's AdamW over all trained tensors; each step has its own settings. ``spec`` contains the
    settings of the model: base, rank, seed and parts.
    """

    def __init__(self, weights: Weights, spec: Mapping[str, Any], version: int = 0) -> None:
        """Create a tenant that trains ``weights``, with a new optimizer and without gradients. ``version`` is the
        number of optimizer steps that the weights have already had."""
        self.weights = weights
        self.spec = dict(spec)
        self.version = version
        """The number of optimizer steps that the weights have had."""
        self.seq = -1
        """The number of the last request whose effect the state includes; −1 before the first request."""
        self.cost_s = 0.0
        """The computing time in seconds since the state was last copied to the disk, which a restart would have to
        repeat."""
        self._names = sorted(weights.tensors)
        """The names of the trained tensors, in the order of the optimizer's parameters."""
        parameters = [weights.tensors[name] for name in self._names]
        fused = all(each.device.type in FUSED_DEVICES for each in parameters)
        self._optimizer = torch.optim.AdamW(parameters, fused=fused or None)
        """AdamW over all trained tensors."""

    @classmethod
    def restored(cls, state: WeightState, *, gradients: bool) -> Tenant:
        """Return a tenant with a ``state`` that was read from the disk. With ``gradients``, restore the accumulated
        gradients that no step has used yet too."""
        tenant = cls(state.weights, state.spec, state.version)
        for name in tenant._names:
            tensor, moments = state.weights.tensors[name], state.moments
            if _STEPS + name in moments:
                tenant._optimizer.state[tensor] = {
                    "step": moments[_STEPS + name].clone(),
                    "exp_avg": moments[_FIRST + name].clone(),
                    "exp_avg_sq": moments[_SECOND + name].clone(),
                }
            if gradients and _GRADIENT + name in moments:
                tensor.grad = moments[_GRADIENT + name].clone()
        return tenant

    def state(self, *, gradients: bool) -> WeightState:
        """Return the state to write to the disk: the weights, the optimizer's moments and, with ``gradients``, the
        accumulated gradients that no step has used yet."""
        moments: dict[str, Tensor] = {}
        for name in self._names:
            tensor = self.weights.tensors[name]
            held = self._optimizer.state.get(tensor)
            if held:
                moments[_STEPS + name] = torch.as_tensor(held["step"])
                moments[_FIRST + name], moments[_SECOND + name] = held["exp_avg"], held["exp_avg_sq"]
            if gradients and tensor.grad is not None:
                moments[_GRADIENT + name] = tensor.grad
        return WeightState(weights=self.weights, spec=self.spec, version=self.version, moments=moments)

    def gradients(self) -> list[Tensor | None]:
        """Return copies of the gradients, one for each trained tensor in a fixed order (``None`` for a tensor without a
        gradient). :meth:`put_back` restores them if a request fails half-way."""
        grads = [self.weights.tensors[name].grad for name in self._names]
        return [None if grad is None else grad.clone() for grad in grads]

    def put_back(self, gradients: list[Tensor | None]) -> None:
        """Replace the gradients by the copies that :meth:`gradients` returned."""
        for name, gradient in zip(self._names, gradients, strict=True):
            self.weights.tensors[name].grad = gradient

    def step(self, settings: AdamBody) -> dict[str, float]:
        """Make one optimizer step with the accumulated gradients and the ``settings`` of the request, and return its
        metrics: the norm of the gradient, and the version after the step.

        Without a gradient nothing changes, not even the version. Raises :class:`~headrace.base.errors.RunError` for a
        gradient that is not finite; the gradient is then discarded, and weights and moments are unchanged.
        """
        trained = [tensor for tensor in self.weights.tensors.values() if tensor.grad is not None]
        if not trained:
            return {"grad_norm": 0.0, "version": float(self.version)}
        gradients = [tensor.grad for tensor in trained if tensor.grad is not None]
        norm = torch.tensor(math.sqrt(sum_of_squares(gradients)))
        if not bool(torch.isfinite(norm)):
            self._optimizer.zero_grad()
            raise RunError(
                f"the norm of the gradient is {float(norm)}: it is dropped, and the weights are unchanged",
                remedy="look at the data of the forward_backward calls before this step",
            )
        if settings.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(trained, settings.grad_clip_norm, norm)
        for group in self._optimizer.param_groups:
            group["lr"], group["betas"] = settings.learning_rate, (settings.beta1, settings.beta2)
            group["eps"], group["weight_decay"] = settings.eps, settings.weight_decay
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": float(norm), "version": float(self.version)}
