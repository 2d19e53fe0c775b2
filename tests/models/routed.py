"""A tiny model of every mixture-of-experts family, and each family's router written again, independently."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.base.types.recorded import Experts, Routing
from headrace.models.attention import NAME
from headrace.models.routing import RoutedModel, find_routing

VOCAB, HIDDEN = 23, 16

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 8, "num_key_value_heads": 2},
    "olmoe": {"num_experts": 8, "norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "head_dim": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 4,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "sliding_window": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 2,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
}
LAYERS = {"deepseek_v3": 2, "glm4_moe": 2}
"""Mixture-of-experts layers out of three, where they are not all."""


def build(kind: str, dtype: torch.dtype = torch.float32, **extra: Any) -> Any:
    """A random model with decided opinions, in evaluation mode."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 4,
        "intermediate_size": 16,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **FAMILIES.get(kind, {}),
        **extra,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME).to(dtype).eval()
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.data = torch.randn(tensor.shape) * 0.3
        for name, parameter in model.named_parameters():
            if name.endswith("router.bias"):
                nn.init.normal_(parameter, std=0.3)
    return model


def find_routed(model: nn.Module) -> RoutedModel:
    routed = find_routing(model)
    assert routed is not None
    return routed


def perturb(model: nn.Module, scale: float = 0.1) -> None:
    """Move every weight, as an optimizer step does, but further."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=scale)


def all_known(experts_NLK: Experts) -> Routing:
    return Routing(known_T=np.ones(len(experts_NLK), bool), experts_RLK=experts_NLK)


def choose(kind: str, router: Any, logits_NE: Tensor) -> list[list[int]]:
    """The experts of each token, best first, one score at a time."""
    return [_choose(kind, router, row) for row in logits_NE.double()]


def _choose(kind: str, router: Any, logits_E: Tensor) -> list[int]:
    scores = logits_E.tolist()
    if kind in {"deepseek_v3", "glm4_moe"}:
        bias = router.e_score_correction_bias.double()
        scores = (1 / (1 + (-logits_E).exp()) + bias).tolist()
        size = router.num_experts // router.num_group
        groups = [range(first, first + size) for first in range(0, router.num_experts, size)]
        groups.sort(key=lambda group: -sum(sorted(scores[expert] for expert in group)[-2:]))
        allowed = {expert for group in groups[: router.topk_group] for expert in group}
        scores = [score if expert in allowed else -torch.inf for expert, score in enumerate(scores)]
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[: router.top_k]


def gates(kind: str, router: Any, logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The family's weights of the given experts, from logits, in the precision of the logits: exponentials and sums."""
    rows = torch.arange(len(logits_NE))[:, None]
    if kind in {"deepseek_v3", "glm4_moe"}:
        score_NK = 1 / (1 + torch.exp(-logits_NE[rows, experts_NK]))
        return router.routed_scaling_factor * score_NK / score_NK.sum(1, keepdim=True)
    exp_NE = torch.exp(logits_NE)
    picked_NK = exp_NE[rows, experts_NK]
    if kind == "olmoe":  # does not renormalise
        return picked_NK / exp_NE.sum(1, keepdim=True)
    return picked_NK / picked_NK.sum(1, keepdim=True)
