"""Detection of the routers of a model."""

# gate: getattr - the settings of a foreign router differ from family to family

from __future__ import annotations

import re
from typing import Any

from torch import nn

from headrace.base.errors import ModelError
from headrace.models.routing.base import MixtureLayer, RoutedModel
from headrace.models.routing.formulas import KnownRouter, find_router

_MIXTURE = re.compile(r"(Experts|Router|Gating|MoE|MoeBlock|MoEBlock)$")
"""The pattern of the class names of mixture-of-experts parts in transformers."""
_ROUTER = re.compile(r"(Router|Gating|MoE\w*Gate)$")
"""The pattern of the class names of routers in transformers."""
_REMEDY = "set learner.keep_routing = false, or use a model whose routing is replayed: docs/models.md lists them"


def find_routing(model: nn.Module) -> RoutedModel | None:
    """Return the mixture-of-experts layers of ``model``, whose parameters may be on the device ``meta``; ``None`` for a
    dense model.

    Raises :class:`~headrace.base.errors.ModelError` for a mixture of experts with unsupported routers.
    """
    kinds = {name: _defining_class(module) for name, module in model.named_modules()}
    routers = {name: kind for name, kind in kinds.items() if _ROUTER.search(kind.__name__)}
    if not routers:
        _refuse(model, {kind for kind in kinds.values() if _MIXTURE.search(kind.__name__)})
        return None
    places = {name: _layer_path(model, name) for name in routers}
    trunk = model.get_submodule(".".join(next(iter(places.values()))[:-2]))
    kind, *others = dict.fromkeys(routers.values())
    known = None if others else find_router(kind, getattr(trunk, "config", None))
    if known is None:
        _refuse(model, {kind, *others})
    assert known is not None
    layers = tuple(
        MixtureLayer(
            depth=int(place[-1]),
            router=model.get_submodule(name),
        )
        for name, place in places.items()
    )
    sizes = {_sizes(layer.router, known) for layer in layers}
    if sizes != {(known.top_k, known.num_experts)}:
        raise ModelError(
            f"the layers of {type(model).__name__} differ in (experts per token, experts): {sorted(map(str, sizes))}",
            remedy=_REMEDY,
        )
    return RoutedModel(layers=layers, known=known)


def is_router(module: nn.Module) -> bool:
    """Return whether ``module`` is a router, by the name of its class."""
    return bool(_ROUTER.search(_defining_class(module).__name__))


def _refuse(model: nn.Module, kinds: set[type[nn.Module]]) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` for a mixture of experts that has parts of the classes ``kinds``;
    do nothing if ``kinds`` is empty."""
    if kinds:
        raise ModelError(
            f"{type(model).__name__} is a mixture of experts ({', '.join(sorted(kind.__name__ for kind in kinds))}) "
            "whose routing can be neither recorded nor replayed: how it weighs the experts is not known",
            remedy=_REMEDY,
        )


def _defining_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that defines the module's forward method; sharding may have derived another class from it."""
    return next(kind for kind in type(module).__mro__ if "forward" in vars(kind))


def _layer_path(model: nn.Module, name: str) -> list[str]:
    """Return the path of the decoder layer that contains the router ``name``, as a list of its parts: the path
    ``model.layers.3`` for the router ``model.layers.3.mlp.gate``."""
    path = name.split(".")
    at = next(
        depth for depth in range(1, len(path)) if isinstance(model.get_submodule(".".join(path[:depth])), nn.ModuleList)
    )
    return path[: at + 1]


def _sizes(router: Any, known: KnownRouter) -> tuple[int, int]:
    """Return the number of experts per token and the number of experts of one router. For a number that the router does
    not have as an attribute or a weight, return that of ``known``."""
    num_experts = next((len(each) for each in router.parameters() if each.ndim == 2), known.num_experts)
    return int(getattr(router, "top_k", known.top_k)), num_experts
