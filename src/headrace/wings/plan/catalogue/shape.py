"""What a model is made of, as its ``config.json`` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model, by its sizes."""

    name: str
    params: int
    """All of them."""
    active: int
    """Those that one token is multiplied with: of a mixture the chosen experts only, and no table of embeddings."""
    expert_params: int = 0
    """Of ``params``, those of all experts together."""
    expert_share: float = 1.0
    """Of the experts, those that one token is sent to."""
    layers: int
    """Decoder layers."""
    attention_width: int
    """Heads · head size."""
    kv_numbers: int
    """That are kept of one token in a key-value cache, over all layers."""
    hidden: int
    """Numbers between two layers."""

    @property
    def flop_per_square(self) -> float:
        """Operations of attention in a training step, for each squared token of a sample: scores and values, two
        products of n² / 2 pairs, forward once and backward twice."""
        return 6.0 * self.layers * self.attention_width


def shape_of(name: str, config: Mapping[str, Any]) -> ModelShape:
    """From the tree of a ``config.json``; ``ValueError`` where it lacks a size.

    >>> tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    ...         "vocab_size": 10}
    >>> shape_of("tiny", tiny).params
    824
    """
    config = config.get("text_config") or config
    hidden, layers, heads = (
        _size(config, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )  # fmt: skip
    head = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    vocabulary = _size(config, "vocab_size") * hidden
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    chosen = int(config.get("num_experts_per_tok") or 0)
    width = config.get("moe_intermediate_size") if experts else None
    inner = 3 * hidden * int(width or _size(config, "intermediate_size"))
    feed_forward = experts * inner + experts * hidden if experts else inner
    met = chosen * inner + experts * hidden if experts else inner
    tables = 1 if config.get("tie_word_embeddings") else 2
    latent = config.get("kv_lora_rank")
    kept = int(latent) + int(config.get("qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head
    return ModelShape(
        name=name,
        params=layers * (attention + feed_forward + 2 * hidden) + tables * vocabulary + hidden,
        active=layers * (attention + met) + vocabulary,
        expert_params=layers * experts * inner,
        expert_share=chosen / experts if experts else 1.0,
        layers=layers,
        attention_width=heads * head,
        kv_numbers=layers * kept,
        hidden=hidden,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r}")
    return value
