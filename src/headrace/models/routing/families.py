"""The gates of each family: what its router gives to *selected* experts, from the scores of all.

Every formula is the one of the family's router in transformers, in the same order of operations and the same precision,
so that the gates of the experts that a router chose are its own, bit for bit. They are gathered from the scores, never
from what a top-k left of them: an expert that the router would not choose now keeps its score and its gradient.

Shape legend: N tokens, E experts, K selected experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.models.routing.base import Gates


def softmax_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Softmax over all experts in float32; divided by the sum of the selected if ``norm_topk_prob``."""
    gates_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float).gather(1, experts_NK)
    if router.norm_topk_prob:
        gates_NK = gates_NK / gates_NK.sum(dim=-1, keepdim=True)
    return gates_NK.to(logits_NE.dtype)


def mixtral_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Softmax over all experts, divided by the sum of the selected; stays in float32."""
    gates_NK = torch.softmax(logits_NE.float(), dim=-1).gather(1, experts_NK)
    return gates_NK / gates_NK.sum(dim=-1, keepdim=True)


def gpt_oss_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Softmax over the selected logits alone."""
    return torch.softmax(logits_NE.gather(1, experts_NK), dim=1, dtype=logits_NE.dtype)


def sigmoid_gates(router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """Sigmoid of each logit, divided by the sum of the selected if ``norm_topk_prob``, times
    ``routed_scaling_factor``. The correction bias and the groups take part in the selection only."""
    gates_NK = logits_NE.sigmoid().gather(1, experts_NK)
    if router.norm_topk_prob:
        gates_NK = gates_NK / (gates_NK.sum(dim=-1, keepdim=True) + 1e-20)
    scaled_NK: Tensor = gates_NK * router.routed_scaling_factor
    return scaled_NK


FAMILIES: dict[str, Gates] = {
    "Qwen3MoeTopKRouter": softmax_gates,
    "OlmoeTopKRouter": softmax_gates,
    "MixtralTopKRouter": mixtral_gates,
    "GptOssTopKRouter": gpt_oss_gates,
    "DeepseekV3TopkRouter": sigmoid_gates,
    "Glm4MoeTopkRouter": sigmoid_gates,
}
"""By the class of the router in transformers."""
