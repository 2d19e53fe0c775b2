"""Note which experts compute each token.

Shape legend: N tokens of a pass, L mixture-of-experts layers, K experts per token and layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.base.types.recorded import Experts
from headrace.models.routing.base import RoutedModel


class RoutingRecorder:
    """Keeps the experts of the last forward pass, while :attr:`on`. Install it once per model.

    Under replay it notes the replayed experts: those that computed the tokens. Not thread-safe.
    """

    def __init__(self, routed: RoutedModel) -> None:
        self.on = False
        """Whether passes are recorded; costs one Python call per layer when off."""
        self._dtype = torch.uint8 if routed.dtype.itemsize == 1 else torch.uint16
        self._chosen: list[Tensor | None] = [None] * routed.num_layers
        for index, layer in enumerate(routed.layers):
            layer.router.register_forward_hook(partial(self._note, index))

    def stacked(self) -> Tensor:
        """Experts ``[N, L, K]`` of the pass since the last call, in the order of their rank, on the model's device, as
        uint8 or uint16. Starts no transfer: it may be part of a captured graph.

        Raises :class:`~headrace.base.errors.ModelError` unless every router ran while the recorder was on.
        """
        chosen = [experts_NK for experts_NK in self._chosen if experts_NK is not None]
        missing = [index for index, experts_NK in enumerate(self._chosen) if experts_NK is None]
        if missing:
            raise ModelError(
                f"no routing was recorded in {len(missing)} of {len(self._chosen)} layers (the first: {missing[0]})",
                remedy="set recorder.on before the forward pass and take once after it; "
                "if that is so, a fused kernel bypasses the router: load the model without it",
            )
        self._chosen = [None] * len(self._chosen)
        return torch.stack(chosen, dim=1).to(self._dtype)

    def take(self) -> Experts:
        """:meth:`stacked` in host memory."""
        experts_NLK: Experts = self.stacked().cpu().numpy()
        return experts_NLK

    def _note(self, index: int, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if self.on:
            self._chosen[index] = output[2]
