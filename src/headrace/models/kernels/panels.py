"""Weights of matrix products in the order in which kernels read them (*panels*), beside the ordinary weights.

    stage    panels of the new version are written, in any thread, into the slot that no pass reads
    commit   parameters point to new memory, one after the other; each product finds the panels of its present weight,
             and the other slot is free from then on

The engine keeps the memory of the slots (:mod:`headrace.engine.native.packing`). Weights without panels (of a learner,
or of an older version) are packed during the call, panel by panel, with the same result and more work. Panels are not
used after their parameter was changed in place. A change that torch does not count (through ``parameter.data``, or by a
fused optimizer) goes unnoticed: such code must point the parameter to other memory instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

RANK_STEP = 16
"""The ranks of adapters on kernels are multiples of this number, the count of float32 in the widest vector."""


class LowRank(NamedTuple):
    """What adapters add to a product of N tokens: ``(x A) B`` of each token's adapter.

    G adapters, I inputs and O outputs, and R, the size between: a multiple of :data:`RANK_STEP`.
    """

    a_GIR: Tensor
    """A of each adapter."""
    b_GRO: Tensor
    """B of each adapter, with its scale."""
    adapter_N: Tensor
    """The adapter of each token, from 0 to G - 1 as int32; -1 for none."""

    def after(self, count: int) -> LowRank:
        """Return what is added to the tokens of the pass after the first ``count``."""
        return self._replace(adapter_N=self.adapter_N[count:])


class PackedProduct(NamedTuple):
    """The tensors of one matrix product, ``x Wᵀ + bias`` and what adapters add, as kernels take them."""

    weight: Tensor
    """The weight, ``[N, K]``."""
    bias: Tensor | None = None
    """The bias, ``[N]``; ``None`` for none."""
    panels: Tensor | None = None
    """The panels of the weight; ``None`` if it is not packed."""
    lora: LowRank | None = None
    """What adapters add; ``None`` for nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The panels of a weight, and the state of the weight when it was packed."""

    weight: Tensor
    """The weight; the reference keeps its memory from being reused at the same address."""
    address: int
    """The address of the weight."""
    panels: Tensor
    """The panels, which kernels read in place of the weight."""
    changes: int
    """The in-place version counter of the parameter when it was packed."""


class Product:
    """The weights of a linear module, with its panels and adapters, for kernels. The engine writes the panels of new
    weights into one of the two slots, ``rooms``."""

    def __init__(self, linear: nn.Linear) -> None:
        """Make the product of the layer ``linear``, without panels and adapters."""
        self.linear = linear
        self.rooms: list[Packed | None] = [None, None]
        """The two slots of panels: those of the present weight, and of the one before or after it; ``None`` for
        empty."""
        self.lora: LowRank | None = None
        """What adapters add to the passes of now."""
        self._parameters: dict[str, Any] = linear._parameters

    def weights(self) -> PackedProduct:
        """Return the present weights as kernels take them, with panels if these belong to the present weight, and with
        the adapters of the pass."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        address = weight.data_ptr()
        for packed in self.rooms:
            if packed is not None and packed.address == address and packed.changes == weight._version:
                return PackedProduct(weight, bias, packed.panels, self.lora)
        return PackedProduct(weight, bias, None, self.lora)


def product_of(linear: nn.Linear) -> Product:
    """Return the product of a linear module, by which kernels find its weights; it is made at the first call."""
    known: Product | None = linear.__dict__.get("product")
    if known is None:
        known = linear.__dict__["product"] = Product(linear)
    return known


def products_of(model: nn.Module) -> list[Product]:
    """Return the products of all linear modules of ``model`` that run on kernels."""
    return [module.__dict__["product"] for module in model.modules() if "product" in module.__dict__]
