"""Find the routers of a loaded model, and compute the gates of each family: the weights that its router gives to
*selected* experts, from the scores of all.

Every formula is that of the family's router in transformers, with the same order of operations and the same precision,
so that the gates of the experts that a router chose equal its own, bit for bit. They are computed from all scores, not
from the result of the top-k: an expert that the router would not choose now keeps its score and its gradient.

Shape legend: N tokens, E experts, K selected experts.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.models.mixtures import NAMES
from headrace.models.routing.base import Gates, MixtureLayer, RoutedModel


def softmax_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return softmax over all experts in float32, divided by the sum of the selected ones if ``norm_topk_prob``."""
    gates_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float).gather(1, experts_NK)
    if router.norm_topk_prob:
        gates_NK = gates_NK / gates_NK.sum(dim=-1, keepdim=True)
    return gates_NK.to(logits_NE.dtype)


def mixtral_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return softmax over all experts, divided by the sum of the selected ones, in float32."""
    gates_NK = torch.softmax(logits_NE.float(), dim=-1).gather(1, experts_NK)
    return gates_NK / gates_NK.sum(dim=-1, keepdim=True)


def gpt_oss_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return softmax over the selected logits only."""
    return torch.softmax(logits_NE.gather(1, experts_NK), dim=1, dtype=logits_NE.dtype)


def sigmoid_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Return the sigmoid of each logit, divided by the sum of the selected ones if ``norm_topk_prob``, times
    ``routed_scaling_factor``. The correction bias and the expert groups affect the selection only."""
    gates_NK = logits_NE.sigmoid().gather(1, experts_NK)
    if router.norm_topk_prob:
        gates_NK = gates_NK / (gates_NK.sum(dim=-1, keepdim=True) + 1e-20)
    scaled_NK: Tensor = gates_NK * router.routed_scaling_factor
    return scaled_NK


FAMILIES: dict[str, Gates] = {
    "Qwen3MoeTopKRouter": softmax_gates,
    "OlmoeTopKRouter": softmax_gates,
    "MixtralTopKRouter": mixtral_gates,
    "GptOssTopKRouter": gpt_oss_gates,
    "DeepseekV3TopkRouter": sigmoid_gates,
    "DeepseekV32TopkRouter": sigmoid_gates,
    "GlmMoeDsaTopkRouter": sigmoid_gates,
    "Glm4MoeTopkRouter": sigmoid_gates,
}
"""The gates of each family, by the class of its router in transformers."""


_MIXTURE = re.compile(r"(Experts|Router|Gating|MoE|MoeBlock|MoEBlock)$")
"""The pattern of class names of mixture-of-experts parts in transformers."""


def find_routing(model: nn.Module) -> RoutedModel | None:
    """Return the mixture-of-experts layers of ``model``; ``None`` for a dense model.

    Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts of an unsupported family.
    """
    parts = {name: _kind(module) for name, module in model.named_modules()}
    routers = [name for name, kind in parts.items() if kind in FAMILIES]
    strange = {kind for kind in parts.values() if _MIXTURE.search(kind) and kind not in FAMILIES}
    if strange and (not routers or any("Router" in kind for kind in strange)):
        raise ModelError(
            f"{type(model).__name__} is a mixture of experts ({', '.join(sorted(strange))}) whose routing can be "
            "neither recorded nor replayed",
            remedy=f"use a model of type {', '.join(NAMES)}, or turn the recording of routing off",
        )
    if not routers:
        return None
    found = [_layer(model, name) for name in routers]
    first: Any = found[0][1].router
    sizes = {(layer.router.top_k, layer.router.num_experts) for _, layer in found}
    if len(sizes) > 1:
        raise ModelError(
            f"the layers of {type(model).__name__} differ in (experts per token, experts): {sorted(map(str, sizes))}",
            remedy="turn the recording of routing off",
        )
    return RoutedModel(
        trunk=found[0][0],
        layers=tuple(layer for _, layer in found),
        top_k=int(first.top_k),
        num_experts=int(first.num_experts),
    )


def _kind(module: nn.Module) -> str:
    """Return the name of the module's class, or of the router class that sharding or an adapter has subclassed."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in names if name in FAMILIES), names[0])


def _layer(model: nn.Module, name: str) -> tuple[nn.Module, MixtureLayer]:
    """Return the trunk, and the layer of the router ``name``, such as ``model.layers.3.mlp.gate``."""
    path = name.split(".")
    at = next(
        depth for depth in range(1, len(path)) if isinstance(model.get_submodule(".".join(path[:depth])), nn.ModuleList)
    )
    router = model.get_submodule(name)
    return (
        model.get_submodule(".".join(path[: at - 1])),
        MixtureLayer(
            depth=int(path[at]),
            router=router,
            attention=model.get_submodule(".".join([*path[: at + 1], "self_attn"])),
            gates=FAMILIES[_kind(router)],
        ),
    )
