"""Weights of matrix products in the order in which kernels read them (*panels*), in addition to the ordinary weights.

    stage    panels of the new version are written, by any thread, into the slot that no pass reads
    commit   parameters are set to new memory, one after the other; each product finds the panels of its present weight,
             and the other slot is free from then on

The engine owns the memory of the slots (:mod:`headrace.engine.native.packing`). Weights without panels (of a learner,
or of an older version) are packed during the call, panel by panel, with the same result and more work. Panels are not
used after their parameter was changed in place. A change that torch does not count (through ``parameter.data``, or by a
fused optimizer) is not detected: such code must set the parameter to other memory instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

RANK_STEP = 16
"""The number of which the ranks of adapters on kernels are multiples: the number of float32 in the widest vector."""


class LowRank(NamedTuple):
    """The tensors of the product ``(x A) B`` that the adapter of each token adds to a product of N tokens.

    There are G adapters, I inputs and O outputs. R is the rank, padded to a multiple of :data:`RANK_STEP`.
    """

    a_GIR: Tensor
    """A of each adapter."""
    b_GRO: Tensor
    """B of each adapter, multiplied by the adapter's scale."""
    adapter_N: Tensor
    """The adapter of each token, from 0 to G - 1 as int32; -1 for no adapter."""

    def after(self, count: int) -> LowRank:
        """Return this record for the tokens of the pass after the first ``count``."""
        return self._replace(adapter_N=self.adapter_N[count:])


class PackedProduct(NamedTuple):
    """The tensors of one matrix product, ``x Wᵀ + bias`` and the adapters' products, as kernels accept them."""

    weight: Tensor
    """The weight, ``[N, K]``."""
    bias: Tensor | None = None
    """The bias, ``[N]``; ``None`` for none."""
    panels: Tensor | None = None
    """The panels of the weight; ``None`` if it is not packed."""
    lora: LowRank | None = None
    """The adapters of the tokens; ``None`` for no adapters."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The panels of a weight, and the state of the weight at the time of packing."""

    weight: Tensor
    """The weight. The reference prevents that its memory is reused at the same address."""
    address: int
    """The address of the weight."""
    panels: Tensor
    """The panels, which kernels read instead of the weight."""
    changes: int
    """The version counter of the parameter at the time of packing, which counts in-place changes."""


class Product:
    """The weights of a linear module, with panels and adapters, for kernels. The engine writes the panels of new
    weights into one of the two slots in :attr:`rooms`."""

    def __init__(self, linear: nn.Linear) -> None:
        """Create the product of the layer ``linear``, without panels and adapters."""
        self.linear = linear
        self.rooms: list[Packed | None] = [None, None]
        """The two slots of panels: for the present weight, and for the previous or next weight; ``None`` for an empty
        slot."""
        self.lora: LowRank | None = None
        """The adapters of the present pass; ``None`` for none."""
        self._parameters: dict[str, Any] = linear._parameters
        """The parameters of the layer by name; a new version replaces their memory."""

    def weights(self) -> PackedProduct:
        """Return the present weights as kernels accept them, with panels if they belong to the present weight, and with
        the adapters of the pass."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        address = weight.data_ptr()
        for packed in self.rooms:
            if packed is not None and packed.address == address and packed.changes == weight._version:
                return PackedProduct(weight, bias, packed.panels, self.lora)
        return PackedProduct(weight, bias, None, self.lora)


def get_product(linear: nn.Linear) -> Product:
    """Return the product of a linear module, through which kernels access its weights; the first call creates it."""
    product: Product | None = linear.__dict__.get("product")
    if product is None:
        product = linear.__dict__["product"] = Product(linear)
    return product


def get_products(model: nn.Module) -> list[Product]:
    """Return the products of all linear modules of ``model`` that are computed by kernels."""
    return [module.__dict__["product"] for module in model.modules() if "product" in module.__dict__]
