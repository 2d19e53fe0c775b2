"""Small models with random weights and a character-level tokenizer, written as ordinary Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from headrace.models.settings import BUILDING

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
"""The special tokens of the tokenizer, with the ids 0, 1 and 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySpec:
    """The description of a small random model for :func:`make_tiny`. Tests, the demo and benchmarks use such models."""

    vocab: str
    """The characters of the tokenizer, each once. Their ids are in this order, after the three special tokens."""
    seed: int = 0
    """The seed of the random weights."""
    kind: str = "qwen3"
    """The ``model_type`` of any causal language model that transformers supports."""
    hidden_size: int = 64
    """The size of a token's hidden state, a multiple of ``num_heads``."""
    num_layers: int = 2
    """The number of layers."""
    num_heads: int = 4
    """The number of query heads per layer."""
    num_kv_heads: int = 2
    """The number of key-value heads per layer."""
    intermediate_size: int = 128
    """The size of a token's inner activation in the feed-forward part of a layer."""
    max_positions: int = 512
    """The longest context, in tokens."""
    init_std: float = 0.02
    """The standard deviation of the random matrices. A larger value makes the model's distribution less uniform."""
    even_ends: bool = False
    """Whether an answer ends with about the same probability at every position, so that lengths have a geometric
    distribution. The logit of the end token is then always 0, and the other logits are around 0. The mean length is
    about the number of characters in ``vocab``."""
    chat_template: str | None = None
    """The Jinja chat template of the tokenizer; ``None`` for a model without chat."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further settings for this ``kind`` of model, such as ``sliding_window``."""


def make_tiny(directory: Path, spec: TinySpec) -> Path:
    """Write a model and its tokenizer into ``directory``, which is created, and return ``directory``. The same spec
    results in the same bytes.

    The tokenizer has different padding and end-of-sequence tokens, and one token per character.
    """
    tokenizer = char_tokenizer(spec.vocab, spec.chat_template)
    config = AutoConfig.for_model(
        spec.kind,
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": spec.hidden_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.hidden_size // spec.num_heads,
            "intermediate_size": spec.intermediate_size,
            "max_position_embeddings": spec.max_positions,
            "initializer_range": spec.init_std,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            **spec.extra,
        },
    )
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # noqa: TID251 - transformers initialises from the global generator
        model = AutoModelForCausalLM.from_config(config)
    if spec.even_ends:
        with torch.no_grad():
            model.get_output_embeddings().weight[tokenizer.eos_token_id] = 0.0
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def char_tokenizer(vocab: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; a character outside ``vocab`` becomes ``<unk>``.

    >>> tokenizer = char_tokenizer("ab c")
    >>> tokenizer.encode("a cab"), tokenizer.decode(tokenizer.encode("a cab"))
    ([3, 5, 6, 3, 4], 'a cab')
    """
    tokens = [PAD, EOS, UNK, *dict.fromkeys(vocab)]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )
