"""Swap the operations inside a loaded model for compiled kernels; modules, names and parameters stay as they are.

    attention    q, k, v as one product, norm and rotation in place, then the plan; out
    gated MLP    gate and up, SiLU and product, down: one call
    RMSNorm      with weight w or 1 + w
    Linear       all others, the head included

What a module computes is not read off its class: a swap stays only if it gives what the module gave on a probe of a few
tokens, and all swaps stay only if the whole model's logits do. Parameters are looked up at every call, so that weights
may be exchanged underneath (``parameter.data = view``).

Shape legend: N tokens, H query heads, K key-value heads, E head size, V vocabulary.
"""

# gate: getattr - foreign modules differ from architecture to architecture

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.attention import PLAN, PackedPlan, Rule, forward
from headrace.models.kernels.build import Unavailable
from headrace.models.kernels.ops import Kernels, kernels

TOLERANCE = 1e-4
"""Largest difference of a probe's numbers, relative to their largest."""

_PROBE = (3, 9)
"""Lengths of the sequences of the probe."""

Norm = tuple[nn.Parameter, float, float]
"""Weight, eps, and what is added to the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseReport:
    """What became of a model."""

    swapped: Mapping[str, int]
    """How many modules of each class run on kernels."""
    kept: Mapping[str, str]
    """Module or class -> why it runs on torch. The key ``model`` stands for all of them."""

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.swapped.items()) or "nothing"
        return "; ".join([f"compiled kernels run {done}", *(f"{name}: {why}" for name, why in self.kept.items())])


class Fused:
    """A module's forward on kernels. Where gradients are wanted the module's own serves."""

    def __init__(self, module: nn.Module, ops: Kernels) -> None:
        self.module, self.ops = module, ops
        self.original = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Linear(Fused):
    module: nn.Linear

    def compute(self, input: Tensor) -> Tensor:
        return self.ops.linear(input, self.module.weight, self.module.bias)


class _Norm(Fused):
    def __init__(self, module: nn.Module, ops: Kernels, norm: Norm) -> None:
        super().__init__(module, ops)
        self.norm = norm

    def compute(self, hidden_states: Tensor) -> Tensor:
        return self.ops.rms_norm(hidden_states, *self.norm)


class _Gated(Fused):
    def __init__(self, module: nn.Module, ops: Kernels) -> None:
        super().__init__(module, ops)
        self.parts: list[nn.Linear] = [getattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")]

    def compute(self, x: Tensor) -> Tensor:
        gate, up, down = self.parts
        return self.ops.gated(x, (gate.weight, gate.bias), (up.weight, up.bias), (down.weight, down.bias))


class FusedAttention(Fused):
    """Queries, keys and values by one product, normed and turned in place; then the plan; then the output's product."""

    def __init__(self, module: nn.Module, ops: Kernels, seen: _Seen) -> None:
        super().__init__(module, ops)
        self.parts: list[nn.Linear] = [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj")]
        self.out: nn.Linear = module.o_proj  # type: ignore[assignment]
        self.norms = [_norm_of(getattr(module, name, None)) for name in ("q_norm", "k_norm")]
        self.rule = seen.rule
        self.sizes = [(tensor.shape[1], tensor.shape[2]) for tensor in seen.qkv]

    def qkv(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Queries ``[N, H, E]``, keys and values, as the plan takes them."""
        joined = self.ops.linears(x, [(part.weight, part.bias) for part in self.parts])[0]
        widths = [heads * size for heads, size in self.sizes]
        apart = joined.split(widths, -1)
        shaped = tuple(part.unflatten(-1, size) for part, size in zip(apart, self.sizes, strict=True))
        for tensor, norm in zip(shaped[:2], self.norms, strict=True):
            self.ops.heads_(tensor, norm, (turn[0][0], turn[1][0]))
        return shaped

    def compute(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        query, key, value = self.qkv(hidden_states, position_embeddings)
        mixed = kwargs[PLAN].attend(query, key, value, self.rule)
        return self.ops.linear(mixed.flatten(1)[None], self.out.weight, self.out.bias), None


def turn_halves(x_NHE: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """The rotation of the fused attention, in torch: ``x cos + (-second half, first half) sin``."""
    cos, sin = (tensor[0][:, None] for tensor in turn)
    size = cos.shape[-1]
    turned, rest = x_NHE[..., :size], x_NHE[..., size:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


@dataclass(slots=True)
class _Seen:
    """What an attention module was given and what it made of it."""

    rule: Rule
    qkv: tuple[Tensor, Tensor, Tensor]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    output: Any = None


class _Watching(PackedPlan):
    """Notes what every layer asks of it."""

    def __init__(self) -> None:
        super().__init__(_PROBE)
        self.seen: dict[int, _Seen] = {}

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        self.seen[rule.layer] = _Seen(rule, (query_NHD, key_NKD, value_NKD))
        return super().attend(query_NHD, key_NKD, value_NKD, rule)


def fuse(model: nn.Module, ops: Kernels | Unavailable | None = None) -> FuseReport:
    """Swap what can be swapped in a float32 model on a CPU in evaluation mode; what cannot be runs as before.

    The model takes a plan (:func:`headrace.models.attention.forward`). Where gradients are enabled the swapped modules
    compute as before, too.
    """
    ops = kernels() if ops is None else ops
    kept: dict[str, str] = {}
    reason = ops.reason if isinstance(ops, Unavailable) else _unfit(model)
    if reason is not None or isinstance(ops, Unavailable):
        return FuseReport(swapped={}, kept={"model": str(reason)})
    with torch.inference_mode():
        before_NV, seen = _watch(model)
        swapped: Counter[str] = Counter()
        for name, module in model.named_modules():
            offer = _offer(module, ops, seen)
            why = None if offer is None else _swap(offer, seen.get(id(module)))
            if why is not None:
                kept[name] = why
            elif offer is not None:
                swapped[type(module).__name__] += 1
        try:
            after_NV = forward(model, _ids(model), PackedPlan(_PROBE))
            wrong = None if _close(after_NV, before_NV) else "the logits are not those of the model on torch"
        except Exception as error:  # noqa: BLE001 - a foreign module may call its parts in any way
            wrong = f"a forward pass fails on kernels: {error}"
    if wrong is not None:
        unfuse(model)
        return FuseReport(swapped={}, kept={**kept, "model": wrong})
    return FuseReport(swapped=dict(swapped), kept=kept)


def unfuse(model: nn.Module) -> None:
    """Give every module its own forward back."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), Fused):
            del module.forward


def _unfit(model: nn.Module) -> str | None:
    strange = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.dtype != torch.float32}
    places = {p.device.type for p in model.parameters()} - {"cpu"}
    if strange or places:
        return f"its parameters are {', '.join(sorted(strange | places))}, and the kernels compute float32 on a CPU"
    return "it is in training mode" if model.training else None


def _watch(model: nn.Module) -> tuple[Tensor, dict[int, _Seen]]:
    """The model's logits on the probe, and what went through its attention modules, by the modules' id."""
    plan = _Watching()
    found: dict[int, _Seen] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen = plan.seen[module.layer_idx]  # type: ignore[index]
        seen.args, seen.kwargs, seen.output = args, kwargs, output
        found[id(module)] = seen

    hooks = [
        module.register_forward_hook(note, with_kwargs=True) for module in model.modules() if _is_attention(module)
    ]
    logits_NV = forward(model, _ids(model), plan)
    for hook in hooks:
        hook.remove()
    return logits_NV, found


def _ids(model: nn.Module) -> Tensor:
    return torch.arange(sum(_PROBE)) % int(model.config.vocab_size)  # type: ignore[union-attr, arg-type, no-any-return]


def _offer(module: nn.Module, ops: Kernels, seen: Mapping[int, _Seen]) -> Fused | None:
    """What might stand in for a module; ``None`` for those that no kernel knows."""
    if "forward" in module.__dict__:  # someone else's hook
        return None
    if type(module) is nn.Linear:
        return _Linear(module, ops)
    if _all_linear(module, "gate_proj", "up_proj", "down_proj") and len(list(module.parameters(recurse=False))) == 0:
        return _Gated(module, ops)
    if id(module) in seen:
        return FusedAttention(module, ops, seen[id(module)])
    norm = _norm_of(module)
    return None if norm is None else _Norm(module, ops, norm)


def _swap(fused: Fused, seen: _Seen | None) -> str | None:
    """Swap if it gives what the module gives; else why not."""
    module = fused.module
    try:
        if seen is not None and seen.kwargs is not None:
            wanted, given = seen.output[0], fused.compute(*seen.args, **seen.kwargs)[0]
        else:
            probe = _probe(fused)
            wanted, given = fused.original(probe), fused.compute(probe)
        right = _close(given, wanted)
    except Exception as error:  # noqa: BLE001 - foreign modules may want anything
        return f"it is not computed as expected ({type(error).__name__}: {error})"
    if not right:
        return "the kernels do not compute what it computes"
    module.forward = fused
    return None


def _probe(fused: Fused) -> Tensor:
    """Rows of very different sizes, so that an epsilon shows."""
    inner = fused.parts[0] if isinstance(fused, _Gated) else fused.module
    width = inner.in_features if isinstance(inner, nn.Linear) else inner.weight.numel()  # type: ignore[operator]
    rows = torch.randn(3, int(width), generator=torch.Generator().manual_seed(0))
    return (rows * torch.tensor([[1.0], [1e-3], [4.0]]))[None]


def _close(given: Tensor, wanted: Tensor) -> bool:
    return given.shape == wanted.shape and bool((given - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def _is_attention(module: nn.Module) -> bool:
    return _all_linear(module, "q_proj", "k_proj", "v_proj", "o_proj") and isinstance(
        getattr(module, "layer_idx", None), int
    )


def _all_linear(module: nn.Module, *names: str) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _norm_of(module: nn.Module | None) -> Norm | None:
    """How a module norms, if it is an RMSNorm: found out by asking it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if module is None or not type(module).__name__.endswith("RMSNorm") or weight is None or not isinstance(eps, float):
        return None
    original: Callable[[Tensor], Tensor] = type(module).forward.__get__(module)
    x = torch.linspace(-1.0, 2.0, weight.numel())
    normed = x * torch.rsqrt(x.square().mean() + eps)
    for plus in (0.0, 1.0):
        if _close(normed * (weight + plus), original(x)):
            return weight, eps, plus
    return None
