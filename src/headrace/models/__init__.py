"""Models: loading of any Hugging Face causal language model by directory, and the attention of engine and learner.

Importing this package imports neither torch nor transformers; importing its modules :mod:`headrace.models.attention`,
``weights``, ``lora``, ``merge`` and ``tiny`` does.
"""

from headrace.models.config import LoraConfig, ModelConfig
from headrace.models.load import load_model, load_tokenizer
from headrace.models.settings import context_length

__all__ = ["LoraConfig", "ModelConfig", "context_length", "load_model", "load_tokenizer"]
