"""One tiny model per way of attending, and the same model under transformers' own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headrace.models.tiny import TinySpec, make_tiny

VOCAB = "abcdefghijklmnopqrstuvwxyz 0123456789"
WINDOW = 5

_MLA = {
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
}
_INDEXED = {**_MLA, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 6, "pad_token_id": None}
"""Without a padding token, whose vector would be 0: it would score all tokens alike, and any choice would be right."""
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
    "gemma4_text": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "final_logit_softcapping": 30.0,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "llama4_text": {
        "attention_chunk_size": 7,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 4,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": _MLA,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": {**_INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
}

_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
}
"""Kinds with layers that keep a state, one for each kind of mixer and of model around it."""


def add_tokens(directory: Path) -> str:
    """Give the tokenizer of a model more tokens than the model knows, and return the last of them."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    added = [f"<extra{number}>" for number in range(200)]
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(directory)
    return added[-1]


def tiny(directory: Path, kind: str, **extra: Any) -> Path:
    """A model with decided opinions, so that a wrong number is a wrong token."""
    settings = {**KINDS.get(kind, {}), **HYBRIDS.get(kind, {}), **extra}
    std = 0.1 if kind in HYBRIDS else 0.25  # the norms inside their mixers make larger ones chaotic
    return make_tiny(directory, TinySpec(vocab=VOCAB, kind=kind, hidden_size=32, init_std=std, extra=settings))


def plain(directory: Path) -> PreTrainedModel:
    """The model as transformers runs it on its own."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
