"""The models that the stages measure: random weights in the shapes of published models, so that no network is needed.

The sizes are copied from the ``config.json`` of each published model; large mixtures have only some of their layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.models.shape import ModelShape, parse_shape
from headrace.wings.bench.gpu.base import StageContext

_QWEN: Mapping[str, Any] = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True}
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=.,:;!? "
"""The characters of the tokenizer that every model receives; all other ids of its vocabulary have no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    """The description of a model with random weights: its kind and its settings."""

    name: str
    kind: str
    """The ``model_type`` of transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its ``config.json``."""

    @property
    def sizes(self) -> ModelShape:
        """The numbers of parameters and of cached values of the model, computed by the planner."""
        return parse_shape(self.name, {"model_type": self.kind, **self.settings})

    def tiny(self) -> RandomModel:
        """Return a tiny model of the same kind, which a CPU computes at once, for ``--pretend``."""
        small = {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 512,
            "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "sliding_window": 16,
        }  # fmt: skip
        kept = {key: small.get(key, value) for key, value in self.settings.items()}
        return RandomModel(name=self.name, kind=self.kind, settings=kept)


def _qwen3(name: str, hidden: int, inner: int, **more: Any) -> RandomModel:
    """Return a dense Qwen3 model with the hidden size ``hidden``, the feed-forward size ``inner``, and the further
    settings ``more``."""
    settings = {
        **_QWEN, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 28, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 8, **more,
    }  # fmt: skip
    return RandomModel(name=name, kind="qwen3", settings=settings)


_MODELS = (
    RandomModel(
        name="qwen2.5-0.5b", kind="qwen2",
        settings={**_QWEN, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                  "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    RandomModel(
        name="qwen2.5-1.5b", kind="qwen2",
        settings={**_QWEN, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                  "num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    _qwen3("qwen3-0.6b", 1024, 3072),
    _qwen3("qwen3-1.7b", 2048, 6144),
    _qwen3(
        "qwen3-8b", 4096, 12_288, num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=False
    ),
    RandomModel(
        name="qwen3-30b-a3b, 8 layers", kind="qwen3_moe",
        settings={**_QWEN, "tie_word_embeddings": False, "hidden_size": 2048, "intermediate_size": 6144,
                  "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                  "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                  "norm_topk_prob": True},
    ),
    RandomModel(
        name="gpt-oss-20b, 4 layers", kind="gpt_oss",
        settings={"vocab_size": 201_088, "tie_word_embeddings": False, "hidden_size": 2880, "intermediate_size": 2880,
                  "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                  "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    ),
)  # fmt: skip
MODELS: Mapping[str, RandomModel] = {model.name: model for model in _MODELS}
"""All models by name."""
SMALL, MIDDLE, LARGE = "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"
"""The names of three dense models of different sizes."""
MEASURED = ("qwen2.5-0.5b", "qwen2.5-1.5b")
"""The names of the models with targets."""
MIXTURE, SINKS = "qwen3-30b-a3b, 8 layers", "gpt-oss-20b, 4 layers"
"""The name of the mixture of experts, and of the model whose attention has sinks."""


def find_model(name: str, *, pretend: bool) -> RandomModel:
    """Return the model ``name`` of :data:`MODELS`; with ``pretend`` a tiny model of its kind."""
    return MODELS[name].tiny() if pretend else MODELS[name]


def write_model(stage: StageContext, name: str, dtype: str) -> Path:
    """Write the model ``name`` with random weights, in the number format ``dtype``, and a tokenizer into a directory
    below the models of ``stage``, unless this directory exists, and return it. The weights are drawn on the device of
    the stage, which is much faster than on a CPU; of a pretended stage, on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from headrace.models.settings import BUILDING
    from headrace.models.tiny import char_tokenizer

    directory = stage.models / f"{name.replace(', ', '-').replace(' ', '-')}-{dtype}"
    if directory.exists():
        return directory
    partial = directory.with_suffix(".partial")  # a stage that was killed may have left this directory
    shutil.rmtree(partial, ignore_errors=True)
    chosen = find_model(name, pretend=stage.pretend)
    tokenizer = char_tokenizer(_CHARACTERS)
    config = AutoConfig.for_model(
        chosen.kind,
        **chosen.settings,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    logging.disable_progress_bar()
    with BUILDING, torch.random.fork_rng(devices=[]), torch.device("cpu" if stage.pretend else stage.request.device):
        torch.manual_seed(0)  # noqa: TID251 - transformers initialises from the global generator
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.to("cpu").save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(directory)
    return directory
