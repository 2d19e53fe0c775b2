"""Forward methods on kernels that replace those of a model's modules. They read the module's parameters at every call.

Shape legend: N tokens, H query heads, E head size.
"""

# gate: getattr - foreign modules differ from architecture to architecture

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.attention import PLAN, Rule
from headrace.models.kernels.ops import Kernels, Norm
from headrace.models.kernels.panels import Product, get_product

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest allowed difference between two results of a probe, relative to the largest number, by the number format
of the kernels."""


class Fused:
    """The base class of forward methods on kernels, objects that replace ``module.forward``. If gradients are enabled,
    they call the module's original forward method. ``ops`` are the kernels."""

    def __init__(self, module: nn.Module, ops: Kernels) -> None:
        """Prepare the replacement of the forward method of ``module``, which is not changed yet, on the kernels
        ``ops``."""
        self.module, self.ops = module, ops
        self.inherited = "forward" not in module.__dict__
        """Whether the original forward method is that of the module's class, and not an attribute of the module."""
        self.original = module.forward
        """The forward method that is replaced."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, from the original forward method if gradients are enabled, otherwise from the
        kernels."""
        if torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed by the kernels. Every subclass overrides this method."""
        raise NotImplementedError


def restore(fused: Fused) -> None:
    """Restore the forward method that ``fused.module`` had before it was replaced."""
    if fused.inherited:
        del fused.module.forward
    else:
        fused.module.forward = fused.original


class FusedLinear(Fused):
    """The forward method of a linear module on kernels."""

    def __init__(self, module: nn.Linear, ops: Kernels) -> None:
        """Prepare the forward method of the linear layer ``module`` on the kernels ``ops``."""
        super().__init__(module, ops)
        self.product = get_product(module)

    def compute(self, input: Tensor) -> Tensor:
        """Return the linear layer's output for ``input``, computed by the kernels."""
        return self.ops.linear(input, self.product.weights())


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """The parameters of a module's RMS normalisation, ``x / rms(x) · (weight + plus)``."""

    module: nn.Module
    """The module that has the weight."""
    eps: float
    """The constant ε that is added to the mean square."""
    plus: float
    """The constant that is added to the weight, 0 or 1."""

    def now(self) -> Norm:
        """Return the kernel's arguments for the normalisation, with the present weight of the module."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight, self.eps, self.plus


class FusedNorm(Fused):
    """The forward method of an RMSNorm module on kernels."""

    def __init__(self, module: nn.Module, ops: Kernels, settings: RmsNorm) -> None:
        """Prepare the forward method of the normalisation ``module`` on the kernels ``ops``. ``settings`` are its
        weight and its epsilon, in the form that kernels need."""
        super().__init__(module, ops)
        self._settings = settings

    @property
    def norm(self) -> Norm:
        """Return the kernel's arguments for the normalisation, with the present weight of the module."""
        return self._settings.now()

    def compute(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised hidden states, computed by the kernels."""
        return self.ops.rms_norm(hidden_states, *self.norm)


class FusedGated(Fused):
    """The forward method of a gated feed-forward module with the layers ``gate_proj``, ``up_proj`` and
    ``down_proj``."""

    def __init__(self, module: nn.Module, ops: Kernels) -> None:
        """Prepare the forward method of a gated feed-forward module on the kernels ``ops``."""
        super().__init__(module, ops)
        self.parts: list[Product] = [
            get_product(getattr(module, name)) for name in ("gate_proj", "up_proj", "down_proj")
        ]

    def compute(self, x: Tensor) -> Tensor:
        """Return ``down(silu(gate(x)) · up(x))``, computed by the kernels in one call."""
        return self.ops.gated(x, *(part.weights() for part in self.parts))


class FusedAttention(Fused):
    """The forward method of an attention module on kernels: one product for queries, keys and values, normalisation and
    rotation in place, then the plan's attention, then the output product. In some families, such as Qwen3.5, the query
    product also contains a gate for each head, after its query. The head's output is multiplied by the gate's
    sigmoid."""

    def __init__(self, module: nn.Module, ops: Kernels, seen: AttentionSample) -> None:
        """Prepare the forward method of ``module`` on the kernels ``ops``. ``seen`` is a recorded call of the module,
        from which the sizes of its heads and its rule are read."""
        super().__init__(module, ops)
        self.parts: list[Product] = [get_product(getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj")]
        self.out: Product = get_product(module.o_proj)  # type: ignore[arg-type]
        self._norms = [find_norm(getattr(module, name, None)) for name in ("q_norm", "k_norm")]
        """The norms of queries and keys; ``None`` where the module has none."""
        self._rule, self._sinks = replace(seen.rule, sinks_H=None), seen.name_of_sinks(module)
        """The rule of the layer without its sinks, and the name of the parameter that has the sinks."""
        self.sizes = [(tensor.shape[1], tensor.shape[2]) for tensor in seen.qkv]
        (heads, size), _, (_, value_size) = self.sizes
        self.gated = module.q_proj.out_features == 2 * heads * size and size == value_size  # type: ignore[union-attr]

    @property
    def rule(self) -> Rule:
        """Return the parameters of the layer's attention, with the present values of its sinks."""
        return replace(self._rule, sinks_H=self.module.get_parameter(self._sinks)) if self._sinks else self._rule

    @property
    def norms(self) -> list[Norm | None]:
        """Return the kernel's arguments for the norms of queries and keys; ``None`` for a norm that does not exist."""
        return [None if how is None else how.now() for how in self._norms]

    def qkv(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return queries ``[N, H, E]``, keys and values of the hidden states ``x``, as a plan accepts them, and the
        gates if there are any. ``turn`` are the cosines and sines of the rotary embedding."""
        joined = self.ops.linears(x, [part.weights() for part in self.parts])[0]
        split = joined.split([part.linear.out_features for part in self.parts], -1)
        heads = [part.unflatten(-1, (num, -1)) for part, (num, _) in zip(split, self.sizes, strict=True)]
        query, *gate = heads[0].chunk(2, -1) if self.gated else heads[:1]
        shaped = (query, *heads[1:], *gate)
        cos, sin = (each[0].to(self.ops.dtype) for each in turn)  # float32 in some bfloat16 models
        for tensor, norm in zip(shaped[:2], self.norms, strict=True):
            self.ops.heads_(tensor, norm, (cos, sin))
        return shaped

    def compute(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute the attention block with the kernels: projections, attention over the plan of the pass, the gate if
        the model has one, and the output projection."""
        query, key, value, *gate = self.qkv(hidden_states, position_embeddings)
        mixed = kwargs[PLAN].attend(query, key, value, self.rule)
        if gate:
            self.ops.gate_(mixed, gate[0])
        return self.ops.linear(mixed.flatten(1)[None], self.out.weights()), None


def rotate_halves(x_NHE: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return the heads ``x_NHE`` rotated by ``turn``, the cosines and sines of the rotary embedding. This is the
    rotation of the fused attention in torch: ``x cos + (-second half, first half) sin``."""
    cos, sin = (tensor[0][:, None] for tensor in turn)
    size = cos.shape[-1]
    rotary, rest = x_NHE[..., :size], x_NHE[..., size:]
    first, second = rotary.chunk(2, -1)
    return torch.cat([rotary * cos + torch.cat([-second, first], -1) * sin, rest], -1)


@dataclass(slots=True)
class AttentionSample:
    """One recorded call of an attention module on the probe, with which its replacement is compared."""

    rule: Rule
    """The parameters of the layer's attention."""
    qkv: tuple[Tensor, Tensor, Tensor]
    """The queries, keys and values that the module passed to the plan: ``[N, heads, size]``."""
    args: tuple[Any, ...] = ()
    """The positional arguments of the call."""
    kwargs: Mapping[str, Any] | None = None
    """The keyword arguments of the call; ``None`` until it has returned."""

    def name_of_sinks(self, module: nn.Module) -> str | None:
        """Return the name of the parameter of ``module`` that contains the sinks; empty if there are no sinks, ``None``
        if they are not a parameter of ``module``."""
        sinks = self.rule.sinks_H
        if sinks is None:
            return ""
        return next((name for name, own in module.named_parameters(recurse=False) if own is sinks), None)


def close(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCES[torch.float32]) -> bool:
    """Return whether two results are the same up to rounding: no number of ``actual`` differs from that of ``expected``
    by more than ``tolerance`` times the largest number of ``expected``."""
    actual, expected = actual.float(), expected.float()
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def find_norm(module: nn.Module | None) -> RmsNorm | None:
    """Return the parameters of a module's normalisation if the module is an RMSNorm, which is tested by evaluating it;
    ``None`` otherwise."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if module is None or not type(module).__name__.endswith("RMSNorm") or weight is None or not isinstance(eps, float):
        return None
    original: Callable[[Tensor], Tensor] = type(module).forward.__get__(module)
    x = torch.linspace(-1.0, 2.0, weight.numel())
    normed = x * torch.rsqrt(x.square().mean() + eps)
    for plus in (0.0, 1.0):
        if close(normed * (weight.float() + plus), original(x)):
            return RmsNorm(module, eps, plus)
    return None
