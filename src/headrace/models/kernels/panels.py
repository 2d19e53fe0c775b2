"""Weights of products in the order in which kernels read them, beside the ones that everybody else sees.

    stage    panels of the version that comes are written, in any thread, into the room that no pass reads
    commit   parameters point elsewhere, one after the other; each product finds the panels of where its weight points
             the other room is the one that no pass reads from then on

The engine keeps the rooms (:mod:`headrace.engine.native.packing`). Weights without panels (those of a learner, copies
of an older version) are packed on the way, panel by panel, with the same result and more work. A parameter that was
changed in place has left its panels behind, and they are not used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Weights(NamedTuple):
    """Of one product, as kernels take them."""

    weight: Tensor
    """``[N, K]``."""
    bias: Tensor | None = None
    """``[N]``."""
    panels: Tensor | None = None
    """The weight, packed."""


class Packed:
    """A weight and its panels; those of no other weight, as long as this is kept."""

    def __init__(self, weight: Tensor, panels: Tensor, parameter: Tensor) -> None:
        """``parameter``: what points at the weight, now or next."""
        self.weight, self.panels = weight, panels
        self.known_by = (weight.data_ptr(), _changes(parameter))


class Product:
    """A linear module's part in what kernels compute."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.rooms: list[Packed | None] = [None, None]
        self._parameters: dict[str, Any] = linear._parameters

    def weights(self) -> Weights:
        """Where they lie now."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        here = (weight.data_ptr(), _changes(weight))
        for packed in self.rooms:
            if packed is not None and packed.known_by == here:
                return Weights(weight, bias, packed.panels)
        return Weights(weight, bias)


def _changes(parameter: Tensor) -> int:
    """How often it has been changed in place, as far as torch counts."""
    return 0 if parameter.is_inference() else parameter._version


def product_of(linear: nn.Linear) -> Product:
    """The one of this module."""
    known: Product | None = linear.__dict__.get("product")
    if known is None:
        known = linear.__dict__["product"] = Product(linear)
    return known


def products_of(model: nn.Module) -> list[Product]:
    """Of all modules that run on kernels."""
    return [module.__dict__["product"] for module in model.modules() if "product" in module.__dict__]
