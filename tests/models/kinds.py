"""One tiny model per way of attending, and the same model under transformers' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from headrace.models.tiny import TinySpec, make_tiny

VOCAB = "abcdefghijklmnopqrstuvwxyz 0123456789"
WINDOW = 5

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def tiny(directory: Path, kind: str, **extra: Any) -> Path:
    """A model with decided opinions, so that a wrong number is a wrong token."""
    settings = {**KINDS.get(kind, {}), **extra}
    return make_tiny(directory, TinySpec(vocab=VOCAB, kind=kind, hidden_size=32, init_std=0.25, extra=settings))


def plain(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it on its own."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
