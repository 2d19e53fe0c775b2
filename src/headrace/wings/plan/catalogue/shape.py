"""The sizes of a model, such as its numbers of parameters and of key-value numbers, computed from its ``config.json``
alone. A plan computes memory and operations from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder-only model that determine its memory and its operations."""

    name: str
    params: int
    """Number of all parameters."""
    active: int
    """Number of parameters with which each token is multiplied. Input embeddings do not count, and of the experts only
    those that process the token."""
    expert_params: int = 0
    """Number of parameters of all experts, over all layers."""
    expert_share: float = 1.0
    """Fraction of the experts that process one token."""
    layers: int
    """Number of decoder layers."""
    attention_width: int
    """Number of heads times head size."""
    kv_numbers: int
    """Number of values that the key-value cache stores per token, over all layers."""
    hidden: int
    """Size of the hidden state between two layers."""
    heads: int = 0
    """Number of query heads of a layer."""
    kv_heads: int = 0
    """Number of key-value heads of a layer."""
    grouped: bool = False
    """Whether several query heads share one key-value head."""
    score_layers: int = 0
    """Number of layers for which padded attention on an accelerator stores the scores in memory for any batch: layers
    with sinks or a soft cap, and layers with a window or chunks and grouped heads."""

    @property
    def flop_per_square(self) -> float:
        """Return the operations of attention in a training step per squared token of a sample. Scores and values are
        two products over n² / 2 pairs, computed once in the forward pass and twice in the backward pass."""
        return 6.0 * self.layers * self.attention_width


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of the model ``name`` from the content of its ``config.json``; raise ``ValueError`` if a size
    is missing.

    >>> tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    ...         "vocab_size": 10}
    >>> shape_of("tiny", tiny).params
    824
    """
    config = config.get("text_config") or config
    hidden, layers, heads = (
        _positive_int(config, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )  # fmt: skip
    head = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    vocabulary = _positive_int(config, "vocab_size") * hidden
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    width = config.get("moe_intermediate_size") if experts else None
    expert = 3 * hidden * int(width or _positive_int(config, "intermediate_size"))
    feed_forward = experts * expert + experts * hidden if experts else expert
    active_feed_forward = chosen * expert + experts * hidden if experts else expert
    tables = 1 if config.get("tie_word_embeddings") else 2
    # multi-head latent attention caches one latent vector and the rotary part of the keys instead of keys and values
    latent = config.get("kv_lora_rank")
    cached = int(latent) + int(config.get("qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head
    return ModelShape(
        name=name,
        params=layers * (attention + feed_forward + 2 * hidden) + tables * vocabulary + hidden,
        active=layers * (attention + active_feed_forward) + vocabulary,
        expert_params=layers * experts * expert,
        expert_share=chosen / experts if experts else 1.0,
        layers=layers,
        attention_width=heads * head,
        kv_numbers=layers * cached,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        grouped=heads != kv_heads,
        score_layers=_score_layers(config, layers, grouped=heads != kv_heads),
    )


def _score_layers(config: Mapping[str, Any], layers: int, *, grouped: bool) -> int:
    """Return the number of layers for which padded attention stores the scores (:attr:`ModelShape.score_layers`)."""
    if config.get("attn_logit_softcapping") or config.get("model_type") == "gpt_oss":
        return layers
    if not grouped:
        return 0
    if kinds := config.get("layer_types"):
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return layers if config.get("sliding_window") and config.get("use_sliding_window", True) else 0


def _positive_int(config: Mapping[str, Any], key: str) -> int:
    """Return the value of ``key`` in the content of a ``config.json``. Raises ``ValueError`` if it is not a positive
    whole number."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r}")
    return value
