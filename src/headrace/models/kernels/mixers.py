"""The mixer of a layer with the gated delta rule, as one kernel call for all sequences that decode.

    [q | k | v | z | b | a] as one product ──▶ convolution, delta rule, norm and gate: states in their slots ──▶ out

The other rows of a pass, which are prompts, use the mixer's own code (:mod:`headrace.models.recurrent`), so that the
result of a row does not depend on the other rows.

Shape legend: N tokens of the pass, R rows that decode.
"""

# gate: getattr - foreign modules differ from architecture to architecture

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.attention import PLAN
from headrace.models.kernels.fused import Fused
from headrace.models.kernels.ops import WIDEST, DeltaNet, Kernels, filter_args, norm_args
from headrace.models.kernels.panels import Product, get_product
from headrace.models.paged.plan import PagedPlan
from headrace.models.recurrent import RecurrentForward, StatePass

PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""The input products of the mixer, in the order of their columns."""


class FusedDeltaNet(Fused):
    """The forward method of a mixer with the gated delta rule, such as Qwen3.5's, on kernels."""

    def __init__(self, module: nn.Module, ops: Kernels) -> None:
        """Prepare the forward method of the mixer ``module`` on the kernels ``ops``."""
        super().__init__(module, ops)
        self.parts: list[Product] = [get_product(getattr(module, name)) for name in PRODUCTS]
        self.out: Product = get_product(module.out_proj)  # type: ignore[arg-type]
        self._layer: int = module.layer_idx  # type: ignore[assignment]
        """The index of the layer."""
        self.sizes: tuple[int, int, int, int] = tuple(  # type: ignore[assignment]
            int(getattr(module, name)) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        )
        """The numbers of key heads and of value heads, and the sizes of a key and of a value."""

    def compute(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Compute the mixer: the kernels compute the sequences that decode, and the original module computes the
        prompts after them."""
        states = decoding_states(kwargs.get(PLAN))
        if states is None:
            return self.original(hidden_states, **kwargs)
        count = states.num_decode
        rows = self.ops.linears(hidden_states[:, :count], [part.weights() for part in self.parts])[0]
        mixed = self.ops.delta_net(self.net(states), rows)
        decoded = self.ops.linear(mixed[None], self.out.weights())
        if count == hidden_states.shape[1]:
            return decoded
        with _later_tokens([*self.parts, self.out], count):
            rest = self.original(hidden_states[:, count:], **{**kwargs, PLAN: states.prompts})
        return torch.cat([decoded, rest], 1)

    def net(self, states: StatePass) -> DeltaNet:
        """Return the kernel's arguments for the rows that decode. ``states`` contains their states. The addresses of
        the weights are the present ones."""
        module: Any = self.module
        windows, deltas, slots_R = states.decode_pools(self._layer)
        weight = module.conv1d.weight[:, 0]
        return DeltaNet(
            filter_args(weight, module.conv1d.bias, silu=True),
            *(module.A_log.data_ptr(), module.dt_bias.data_ptr()),
            norm_args((module.norm.weight, module.norm.variance_epsilon, 0.0)),
            *(windows.data_ptr(), deltas.data_ptr(), slots_R.data_ptr()),
            *(len(slots_R), *self.sizes),
        )


@contextmanager
def _later_tokens(products: Sequence[Product], count: int) -> Iterator[None]:
    """A context in which the adapters of ``products`` apply to the tokens after the first ``count``, which the body
    computes alone."""
    before = [product.lora for product in products]
    try:
        for product, lora in zip(products, before, strict=True):
            product.lora = None if lora is None else lora.after(count)
        yield
    finally:
        for product, lora in zip(products, before, strict=True):
            product.lora = lora


def decoding_states(plan: Any) -> StatePass | None:
    """Return the recurrent states of a pass in which some sequences decode; ``None`` for any other pass. ``plan`` is
    the plan of the pass, or ``None``."""
    states = plan.states if isinstance(plan, PagedPlan) else None
    return states if states is not None and states.num_decode else None


def fits_delta_net(module: nn.Module) -> bool:
    """Return whether a module has the parts of a mixer that :class:`FusedDeltaNet` can replace. Whether it computes the
    same as the kernel is tested later, by decoding."""
    own = module.__dict__.get("forward")
    linear = all(type(getattr(module, name, None)) is nn.Linear for name in (*PRODUCTS, "out_proj"))
    if not linear or not isinstance(own, RecurrentForward):
        return False
    filters = getattr(module, "conv1d", None)
    norm = getattr(module, "norm", None)
    return (
        isinstance(filters, nn.Conv1d)
        and filters.kernel_size[0] <= WIDEST
        and all(hasattr(module, name) for name in ("A_log", "dt_bias", "num_k_heads", "num_v_heads", "head_k_dim"))
        and all(hasattr(norm, name) for name in ("weight", "variance_epsilon"))
    )
