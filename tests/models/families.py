"""Tiny models of the families that people bring, by name, and each as transformers runs it on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.models import kinds, wrapped

LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 6.4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 3.0, 2.0, 8.0],
    },
}
"""Position embeddings of 8 numbers that change beyond ``original_max_position_embeddings``."""
GEMMA4_MOE: dict[str, Any] = {
    **kinds.KINDS["gemma4_text"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
"""The larger Gemma 4: experts beside the feed-forward part, values that are the keys, no inputs of each layer."""
FAST = ("qwen3_5_text", "qwen3_5", "longrope")
"""One hybrid, one multimodal checkpoint, one model whose positions are scaled by length."""
FAMILIES = (
    *FAST,
    *(name for name in kinds.HYBRIDS if name not in FAST),
    *("gemma3", "gemma4", "qwen3_vl", "qwen3_vl_moe", "mistral3", "llama4"),
    *(
        "llama4_text",
        "gemma4_text",
        "gemma4_moe",
        "gemma3_text",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "gpt_oss",
        "qwen3_moe",
    ),
)
"""All families that the slow tests cover."""


def family(directory: Path, name: str, **extra: Any) -> Path:
    """Write a tiny model of the family ``name`` into ``directory``."""
    if name in wrapped.WRAPPERS:
        return wrapped.tiny_wrapper(directory, name, **extra)
    if name == "gemma4_moe":
        return kinds.tiny(directory, "gemma4_text", **{**GEMMA4_MOE, **extra})
    if name == "longrope":
        longest = int(extra.get("max_position_embeddings", 512))
        rope = {**LONGROPE["rope_parameters"], "original_max_position_embeddings": longest}
        return kinds.tiny(directory, "llama", rope_parameters=rope, **{**extra, "max_position_embeddings": 4 * longest})
    return kinds.tiny(directory, name, **extra)


def by_transformers(directory: Path, name: str) -> PreTrainedModel:
    """The model as transformers runs it; of a multimodal checkpoint, the whole."""
    return wrapped.whole(directory) if name in wrapped.WRAPPERS else kinds.plain(directory)
