"""Tiny random models of any architecture, made from its default settings with small sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.models.text_part import causal_class
from headrace.models.tiny import char_tokenizer

VOCAB = "abcdefghijklmnopqrstuvwxyz 0123456789"
SPECIAL = 40
"""The id of tokens that stand for images and sounds, beyond the tokenizer's."""
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "initializer_range": 0.2,
    "init_std": 0.2,
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    "head_dim": 8,
    "global_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 5,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
    "n_shared_experts": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "state_size": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "attention_chunk_size": 8,
    "rotary_dim": 8,
    "conv_L_cache": 3,
    "qk_head_dim": 24,
    "query_pre_attn_scalar": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "swa_v_head_dim": 8,
    "moe_ffn_hidden_size": 32,
    "mlp_hidden_size": 64,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": None,
    "intermediate_size_mlp": 64,
}
"""Sizes by the names that architectures give them."""
_SPECIAL_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "decoder_start_token_id": 1}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 16,
}
EXTRA: dict[str, dict[str, Any]] = {
    "mpt": {"d_model": 32, "n_heads": 4},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16, "max_position_embeddings": 256},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "modernbert-decoder": {"bos_token_id": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "sliding_attention": None,
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cosmos3_edge_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    },
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cwm": {"bos_token_id": 2},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "max_window_layers": 1},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": _GEMMA4,
    "glm4v_moe_text": {"head_dim": 16},
    "gemma4_unified_text": _GEMMA4,
}
"""Settings that one architecture needs beside the sizes."""
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
MROPE = frozenset(
    {
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "glm4v_text",
        "glm4v_moe_text",
        "glm_ocr_text",
    }
)
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [],
}


def make_settings(kind: str) -> dict[str, Any]:
    """Return small settings for the model type ``kind``, under the names that its config class has."""
    drawn = CONFIG_MAPPING[kind]()
    drawn.allow_global_per_layer_attribute_access = True  # for a look at the defaults
    fixed = {name for name, found in vars(type(drawn)).items() if isinstance(found, property)}
    known = {name: value for name, value in {**SMALL, **_SPECIAL_IDS}.items() if hasattr(drawn, name)}
    known = {name: value for name, value in known.items() if name in _SPECIAL_IDS or getattr(drawn, name) is not None}
    if "kv_lora_rank" in known:  # keys and values of all heads come from the same latent numbers
        known["num_key_value_heads"] = known["num_attention_heads"]
    known = {name: value for name, value in known.items() if name not in fixed}
    if hasattr(drawn, "is_decoder") and not drawn.is_encoder_decoder:
        known["is_decoder"] = True  # without it, models such as bert attend to what follows
    return {**known, **(_MROPE if kind in MROPE else {}), **EXTRA.get(kind, {})}


def write_model(directory: Path, kind: str) -> Path:
    """Write a tiny random model of the type ``kind`` with a tokenizer into ``directory``; of a multimodal type, the
    whole model."""
    config_class = CONFIG_MAPPING[kind]
    drawn = config_class()
    text = drawn.get_text_config(decoder=True)
    if text is drawn or "text_config" not in drawn.sub_configs:
        config = config_class(**make_settings(kind))
        chosen = causal_class(config)
    else:
        parts: dict[str, Any] = {"text_config": {"model_type": text.model_type, **make_settings(text.model_type)}}
        for name in drawn.sub_configs:
            part = getattr(drawn, name, None)
            if name != "text_config" and part is not None:
                small = {key: value for key, value in _VISION.items() if hasattr(part, key)}
                parts[name] = {"model_type": part.model_type, **small}
        ids = [name for name in drawn.to_dict() if name.endswith(("_token_id", "_token_index"))]
        config = config_class(**parts, **{name: SPECIAL for name in ids if name not in _SPECIAL_IDS})
        chosen = MODEL_FOR_MULTIMODAL_LM_MAPPING[config_class]
    if chosen is None:
        raise ValueError("transformers knows no causal language model of that type")
    torch.manual_seed(0)  # noqa: TID251 - transformers initialises from the global generator
    made = chosen._from_config(config)
    if made.generation_config is not None:
        made.generation_config.eos_token_id = _SPECIAL_IDS["eos_token_id"]
    made.save_pretrained(directory)
    char_tokenizer(VOCAB).save_pretrained(directory)
    return directory
