"""The sizes of a model, such as its numbers of parameters and of key-value numbers, computed from its ``config.json``
alone. A plan computes memory and operations from them, and a learner the memory that its settings would free.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

NORMED_HEADS = frozenset(
    {"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "glm4_moe", "olmo2", "olmo3", "hunyuan_v1_dense"}
)
"""The types of models that normalise queries and keys."""
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""The types of models whose layers normalise the input and the output of attention and of the feed-forward part."""
INTERLEAVED_GATES = frozenset({"gpt_oss"})
"""The types of models whose experts have gate and input in alternate columns, and limit both."""
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})
"""The types of layers that pass a state from token to token."""


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
    plain_score_layers: int = 0
    """Number of these layers that store the scores on every device, because of sinks or a soft cap."""
    vocabulary: int = 0
    """Number of entries of the vocabulary."""
    tied: bool = False
    """Whether embeddings and head are the same weight."""
    inner: int = 0
    """Size of the feed-forward part of a layer; in a mixture, of one expert."""
    num_experts: int = 0
    """Number of experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Number of experts that process one token; 0 for a dense model."""
    num_norms: int = 2
    """Number of norms of a layer over the hidden size."""
    normed_heads: bool = False
    """Whether queries and keys are normalised."""
    interleaved: bool = False
    """Whether experts have gate and input in alternate columns."""
    softcapped: bool = False
    """Whether attention scores are limited by a soft cap."""
    whole_sequences: bool = False
    """Whether ranks cannot divide the tokens of a sample: the model has recurrent layers or an indexer."""
    has_sinks: bool = False
    """Whether a learned score without a value takes part in the softmax of each head."""

    @property
    def flop_per_square(self) -> float:
        """Return the operations of attention in a training step per squared token of a sample. Scores and values are
        two products over n² / 2 pairs, computed once in the forward pass and twice in the backward pass."""
        return 6.0 * self.layers * self.attention_width

    @property
    def kv_width(self) -> int:
        """Return the number of key-value heads times head size."""
        return self.attention_width // max(1, self.heads) * self.kv_heads

    @property
    def table_params(self) -> int:
        """Return the number of parameters of the head, and of the embeddings."""
        return self.vocabulary * self.hidden

    @property
    def layer_params(self) -> float:
        """Return the number of parameters of one layer."""
        return (self.params - (1 if self.tied else 2) * self.table_params - self.hidden) / self.layers

    def adapter_params(self, rank: int, *, experts: bool = False) -> float:
        """Return the number of parameters of one low-rank adapter of all linear layers: for each matrix, ``rank`` times
        its inputs and outputs. Experts are adapted only with ``experts``."""
        hidden, width, inner = self.hidden, self.attention_width, self.inner
        numbers = 2 * (hidden + width) + 2 * (hidden + self.kv_width)
        if not self.num_experts:
            numbers += 3 * (hidden + inner)
        elif experts:
            numbers += self.num_experts * 3 * (hidden + inner)
        return float(rank * self.layers * numbers)


def pair_bytes(itemsize: int, *, softcapped: bool) -> int:
    """Return the number of bytes that the scores of one head in padded attention use until the backward pass, for each
    pair of tokens: the weights in float32, the weights in the model's dtype of ``itemsize`` bytes unless it is float32,
    and, if ``softcapped``, the capped scores before the softmax."""
    return (4 if itemsize == 4 else 4 + itemsize) + (itemsize if softcapped else 0)


def parse_shape(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes of the model ``name`` from the content of its ``config.json``; raise ``ValueError`` if a size
    is missing.

    >>> tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    ...         "vocab_size": 10}
    >>> parse_shape("tiny", tiny).params
    824
    """
    config = config.get("text_config") or config
    kind = config.get("model_type")
    hidden, layers, heads = (
        _positive_int(config, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )  # fmt: skip
    head = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    vocabulary = _positive_int(config, "vocab_size")
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    selected = int(config.get("num_experts_per_tok") or 0) if experts else 0
    width = config.get("moe_intermediate_size") if experts else None
    inner = int(width or _positive_int(config, "intermediate_size"))
    expert = 3 * hidden * inner
    feed_forward = experts * expert + experts * hidden if experts else expert
    active_feed_forward = selected * expert + experts * hidden if experts else expert
    tied = bool(config.get("tie_word_embeddings"))
    # multi-head latent attention caches one latent vector and the rotary part of the keys instead of keys and values
    latent = config.get("kv_lora_rank")
    cached = int(latent) + int(config.get("qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head
    has_sinks = kind == "gpt_oss"
    return ModelShape(
        name=name,
        params=layers * (attention + feed_forward + 2 * hidden) + (1 if tied else 2) * vocabulary * hidden + hidden,
        active=layers * (attention + active_feed_forward) + vocabulary * hidden,
        expert_params=layers * experts * expert,
        expert_share=selected / experts if experts else 1.0,
        layers=layers,
        attention_width=heads * head,
        kv_numbers=layers * cached,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        grouped=heads != kv_heads,
        score_layers=_score_layers(config, layers, grouped=heads != kv_heads),
        plain_score_layers=layers if has_sinks or config.get("attn_logit_softcapping") else 0,
        vocabulary=vocabulary,
        tied=tied,
        inner=inner,
        num_experts=experts,
        experts_per_token=selected,
        num_norms=4 if kind in FOUR_NORMS else 2,
        normed_heads=kind in NORMED_HEADS,
        interleaved=kind in INTERLEAVED_GATES,
        softcapped=bool(config.get("attn_logit_softcapping")),
        whole_sequences=bool(config.get("index_topk"))
        or not RECURRENT_LAYERS.isdisjoint(config.get("layer_types") or ()),
        has_sinks=has_sinks,
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
