"""Weights of products in the order in which kernels read them, beside the ones that everybody else sees.

    stage    panels of the version that comes are written, in any thread, into the room that no pass reads
    commit   parameters point elsewhere, one after the other; each product finds the panels of where its weight points
             the other room is the one that no pass reads from then on

The engine keeps the rooms (:mod:`headrace.engine.native.packing`). Weights without panels (those of a learner, copies
of an older version) are packed on the way, panel by panel, with the same result and more work. A parameter that was
changed in place has left its panels behind, and they are not used; who writes where torch does not count it (through
``parameter.data``, or by a fused optimizer) has to point the parameter elsewhere instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class PackedProduct(NamedTuple):
    """Of one product, as kernels take them."""

    weight: Tensor
    """``[N, K]``."""
    bias: Tensor | None = None
    """``[N]``."""
    panels: Tensor | None = None
    """The weight, packed."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight and its panels."""

    weight: Tensor
    """Held, so that nothing else comes to lie where it lies."""
    address: int
    """Where it lies."""
    panels: Tensor
    changes: int
    """How often its parameter had been changed in place."""


class Product:
    """A linear module's part in what kernels compute."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.rooms: list[Packed | None] = [None, None]
        self._parameters: dict[str, Any] = linear._parameters

    def weights(self) -> PackedProduct:
        """Where they lie now."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        address = weight.data_ptr()
        for packed in self.rooms:
            if packed is not None and packed.address == address and packed.changes == weight._version:
                return PackedProduct(weight, bias, packed.panels)
        return PackedProduct(weight, bias)


def product_of(linear: nn.Linear) -> Product:
    """The one of this module."""
    known: Product | None = linear.__dict__.get("product")
    if known is None:
        known = linear.__dict__["product"] = Product(linear)
    return known


def products_of(model: nn.Module) -> list[Product]:
    """Of all modules that run on kernels."""
    return [module.__dict__["product"] for module in model.modules() if "product" in module.__dict__]
