"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config import Section

SUPPORTED = "use a decoder-only text model whose layers all attend causally (qwen3, llama, gemma3_text, ...)"
"""What to do about a model that cannot be used."""


class ModelConfig(Section):
    """Which model, and in which number format it is kept."""

    path: str = Field(min_length=1)
    """Directory of a Hugging Face causal language model with its tokenizer and safetensors weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights, in engine and learner alike."""
