"""Find the routers of a loaded model, through whatever wraps it."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from headrace.base.errors import ModelError
from headrace.models.mixtures import NAMES
from headrace.models.routing.base import MixtureLayer, RoutedModel
from headrace.models.routing.families import FAMILIES

_MIXTURE = re.compile(r"(Experts|Router|Gating|MoE|MoeBlock|MoEBlock)$")
"""What transformers calls the parts of a mixture of experts."""


def find_routing(model: nn.Module) -> RoutedModel | None:
    """Where ``model`` routes; ``None`` for a dense one.

    Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts of a family that is not known here.
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
    """The name of its class; of the router's class where sharding or an adapter has made a subclass of it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((name for name in names if name in FAMILIES), names[0])


def _layer(model: nn.Module, name: str) -> tuple[nn.Module, MixtureLayer]:
    """The trunk, and the layer of the router ``name``, such as ``model.layers.3.mlp.gate``."""
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
