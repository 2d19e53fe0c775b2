"""The description of a model's mixture-of-experts layers, for recording and replaying their routing.

Shape legend: N tokens of a pass, E experts, K experts per token and layer, L mixture-of-experts layers, R tokens whose
routing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from headrace.base.types.recorded import Experts
from headrace.models.routing.formulas import KnownRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLayer:
    """One mixture-of-experts layer of a model: its position and its router."""

    depth: int
    """The index of the decoder layer that contains it."""
    router: nn.Module
    """The router module, whose output :meth:`KnownRouter.read` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedModel:
    """A model with mixture-of-experts layers. Layers without experts are not included."""

    layers: tuple[MixtureLayer, ...]
    """The mixture-of-experts layers, in the order of the model."""
    known: KnownRouter
    """The properties of the routers, which are all of the same class."""

    @property
    def top_k(self) -> int:
        """Return the number of experts per token and layer."""
        return self.known.top_k

    @property
    def num_experts(self) -> int:
        """Return the number of experts per layer, without shared experts."""
        return self.known.num_experts

    @property
    def num_layers(self) -> int:
        """Return the number of mixture-of-experts layers, at least one."""
        return len(self.layers)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of recorded experts: uint8, or uint16 for more than 256 experts."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    def problem(self, experts_RLK: Experts) -> str:
        """Return why the model cannot have chosen these recorded experts, in words: a wrong shape or dtype, an unknown
        or repeated expert. Empty if it can have chosen them."""
        expected = (self.num_layers, self.top_k)
        if experts_RLK.ndim != 3 or experts_RLK.shape[1:] != expected:
            return f"experts of shape {experts_RLK.shape} for {expected[0]} layers of {expected[1]} experts per token"
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
