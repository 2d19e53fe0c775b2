"""What a mixture-of-experts model is, for recording and replaying its routing.

Shape legend: N tokens of a pass, E experts, K experts per token and layer, L mixture-of-experts layers, R tokens whose
routing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from headrace.base.types.recorded import Experts

Gates = Callable[[Any, Tensor, Tensor], Tensor]
"""``gates(router, logits_NE, experts_NK)``: the weights ``[N, K]`` that the router gives to selected experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLayer:
    """One mixture-of-experts layer."""

    depth: int
    """Of the decoder layer that it is in."""
    router: nn.Module
    """Gives ``(logits_NE, gates_NK, experts_NK)``."""
    attention: nn.Module
    """Of the same decoder layer: runs before the router, and gets the keywords of the pass."""
    gates: Gates


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedModel:
    """Where a model routes. Layers without experts are not counted."""

    trunk: nn.Module
    """The module whose keywords reach every layer."""
    layers: tuple[MixtureLayer, ...]
    top_k: int
    """Experts per token and layer."""
    num_experts: int
    """Experts of a layer, without shared ones."""

    @property
    def num_layers(self) -> int:
        """Mixture-of-experts layers, at least one."""
        return len(self.layers)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of recorded experts: uint8, or uint16 above 256 experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def problem(self, experts_RLK: Experts) -> str:
        """Why these cannot be experts that this model chose, in words; empty if they can."""
        wanted = (self.num_layers, self.top_k)
        if experts_RLK.ndim != 3 or experts_RLK.shape[1:] != wanted:
            return f"experts of shape {experts_RLK.shape} for {wanted[0]} layers of {wanted[1]} experts per token"
        if experts_RLK.dtype.kind != "u":
            return f"experts of dtype {experts_RLK.dtype}, expected {self.dtype}"
        if not experts_RLK.size:
            return ""
        if int(experts_RLK.max()) >= self.num_experts:
            row, layer, _ = np.argwhere(experts_RLK >= self.num_experts)[0]
            return (
                f"row {row}, layer {layer}: expert {experts_RLK[row, layer].max()} of {self.num_experts} "
                f"(they count from 0)"
            )
        sorted_RLK = np.sort(experts_RLK, axis=-1)
        twice_RL = (sorted_RLK[..., 1:] == sorted_RLK[..., :-1]).any(-1)
        if twice_RL.any():
            row, layer = np.argwhere(twice_RL)[0]
            return f"row {row}, layer {layer}: the experts {experts_RLK[row, layer].tolist()} are not distinct"
        return ""
