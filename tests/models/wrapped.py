"""Tiny multimodal checkpoints, whose text part is a small random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from headrace.models.tiny import char_tokenizer
from tests.models.kinds import HYBRIDS, KINDS, VOCAB, WINDOW

SPECIAL = 40
"""The id that stands for images, beyond the characters of the tokenizer."""

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
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
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_vl": _MROPE,
    "mistral3": {},
    "llama4": KINDS["llama4_text"],
    "qwen3_vl_moe": {**_MROPE, **KINDS["qwen3_moe"]},
    "gemma4": KINDS["gemma4_text"],
    "qwen3_5": {**HYBRIDS["qwen3_5_text"], "initializer_range": 0.1},
}
"""The text settings of each tested kind: text models that have a causal model of their own, one that has none, and
one of another family."""


def tiny_wrapper(directory: Path, kind: str, **extra: Any) -> Path:
    """Write a tiny multimodal checkpoint of ``kind`` with its tokenizer into ``directory``."""
    config_class = CONFIG_MAPPING[kind]
    drawn = config_class()
    text_kind = drawn.get_text_config(decoder=True).model_type
    parts: dict[str, Any] = {"text_config": {"model_type": text_kind, **_TEXT, **WRAPPERS.get(kind, {}), **extra}}
    if getattr(drawn, "vision_config", None) is not None:
        known = {name: value for name, value in _VISION.items() if hasattr(drawn.vision_config, name)}
        parts["vision_config"] = {"model_type": drawn.vision_config.model_type, **known}
    ids = [name for name in drawn.to_dict() if name.endswith(("_token_id", "_token_index"))]
    config = config_class(**parts, **{name: SPECIAL for name in ids if name[:3] not in ("pad", "eos", "bos")})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODEL_FOR_MULTIMODAL_LM_MAPPING[config_class]._from_config(config)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    char_tokenizer(VOCAB).save_pretrained(directory)
    return directory


def whole(directory: Path) -> PreTrainedModel:
    """The multimodal model as transformers runs it."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    return model.eval()
