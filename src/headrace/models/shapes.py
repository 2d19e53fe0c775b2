"""What every layer of a model stores of a token in a key-value cache, learned by watching a pass over a few tokens.

Shape legend: N tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import ModelError
from headrace.models.attention import PackedPlan, Rule, forward
from headrace.models.config import SUPPORTED
from headrace.models.paged.base import LayerShape

NUM_TOKENS = 2
"""Of the pass; enough for every layer to be called."""


class _ShapeRecorder:
    """A plan that notes the shape of what each layer hands to attention."""

    def __init__(self, plan: PackedPlan) -> None:
        self.positions_N = plan.positions_N
        self.shapes: dict[int, LayerShape] = {}
        self._plan = plan

    def attend(self, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rule: Rule) -> Tensor:
        self.shapes[rule.layer] = LayerShape(
            heads=key_NKD.shape[1], key_size=key_NKD.shape[2], value_size=value_NKD.shape[2]
        )
        return self._plan.attend(query_NHD, key_NKD, value_NKD, rule)


@torch.inference_mode()
def cache_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """The shape of every layer's keys and values, in the order of the layers.

    Raises :class:`~headrace.base.errors.ModelError` if a layer attends by other means than transformers' interface, or
    keys and values do not have the same number of heads.
    """
    watch = _ShapeRecorder(PackedPlan([NUM_TOKENS], model.device))
    forward(model, torch.zeros(NUM_TOKENS, dtype=torch.long, device=model.device), watch)
    if sorted(watch.shapes) != list(range(len(watch.shapes))) or not watch.shapes:
        raise ModelError(
            f"a {type(model).__name__} attends in layers {sorted(watch.shapes)} only: others keep no keys and values",
            remedy=SUPPORTED,
        )
    return tuple(watch.shapes[layer] for layer in range(len(watch.shapes)))
