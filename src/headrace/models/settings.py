"""Read the settings of a model directory, its ``config.json``; every failure becomes an error with a remedy.

Importing this module imports neither torch nor transformers, and reading settings imports transformers without torch.
"""

# gate: getattr - the settings of a foreign config differ from model to model

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ModelError
from headrace.models.config import SUPPORTED
from headrace.models.rope import ContextLimit, context_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REMEDY = (
    "give the directory of a Hugging Face causal language model: config.json, tokenizer, *.safetensors; or its name on "
    "a hub: OWNER/NAME"
)
"""The remedy for a directory that does not hold a model."""
LAYER_TYPES = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
        *("linear_attention", "conv", "hybrid"),
        *("mlp", "moe"),
    }
)
"""The types of layers that are supported: those that attend, those that keep a state, and those that do neither."""
BUILDING = threading.RLock()
"""The lock that a thread holds while transformers or peft builds a model for it. Meanwhile they change what the whole
process uses: torch's default dtype, its random generator, and the method that ties weights. Of two threads that did so
at once, the second would keep and restore what the first had changed."""


@contextmanager
def called(setting: str) -> Iterator[None]:
    """Let errors about a model directory name ``setting`` instead of ``model.path``, within this context."""
    try:
        yield
    except ModelError as error:
        problem, remedy = (text.replace("model.path", setting) for text in (error.problem, error.remedy))
        raise ModelError(problem, remedy=remedy) from error


def read_config(path: str) -> PreTrainedConfig:
    """Load the configuration of the model directory ``path``; of a multimodal checkpoint, that of its text part.

    Raises :class:`~headrace.base.errors.ModelError`, for example if there are several text parts.
    """
    return text_config_of(path, read_whole_config(path))


def read_whole_config(path: str) -> PreTrainedConfig:
    """Load the configuration of the model directory ``path``, with all parts of a multimodal checkpoint."""
    spare_torch()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file, tree = model_directory(path) / "config.json", {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds a {type(tree).__name__}, not an object")
        return AutoConfig.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
    except FileNotFoundError:
        if (file.parent / "adapter_config.json").is_file():
            raise ModelError(
                f"model.path={path!r} holds an adapter, and no model",
                remedy=f"set model.path to the model it was trained on, and model.lora.adapter = {path!r}",
            ) from None
        raise ModelError(f"model.path={path!r} holds no config.json", remedy=REMEDY) from None
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        if isinstance(error, StrictDataclassError):
            _refuse_unknown_layers(path, tree)  # transformers would name types that are refused here
        corrected = "correct that setting, or copy config.json from where the model comes from"
        remedy = corrected if isinstance(error, StrictDataclassError) else REMEDY
        raise ModelError(f"{file} cannot be used: {error}", remedy=remedy) from error


def _refuse_unknown_layers(path: str, tree: dict[str, Any]) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if the settings ``tree`` name types of layers that are not
    supported."""
    for part in (tree, *(each for each in tree.values() if isinstance(each, dict))):
        if strange := sorted(set(map(str, part.get("layer_types") or ())) - LAYER_TYPES):
            raise ModelError(
                f"model.path={path!r} is a {part.get('model_type')}: it has layers of type {', '.join(strange)}",
                remedy=f"use a model whose layer_types are among {', '.join(sorted(LAYER_TYPES))}",
            )


def text_config_of(path: str, whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text part of a multimodal model; ``whole`` itself for a model of text alone.

    Raises :class:`~headrace.base.errors.ModelError` for a configuration with several text parts.
    """
    try:
        return whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(
            f"model.path={path!r} is a {whole.model_type}: its text part is ambiguous: {error}", remedy=SUPPORTED
        ) from None


def by_layer(config: PreTrainedConfig, name: str) -> list[Any]:
    """Return the different values that a setting has in the layers of a model: one in most, several where layers
    differ, such as the head sizes of Gemma 4; ``[]`` if the model has no such setting."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = [getattr(layer, name, None) for layer in layers]
    flat = [each for value in found for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for place, value in enumerate(flat) if value is not None and value not in flat[:place]]


def limit_of(path: str) -> ContextLimit:
    """Return the longest context that the model of directory ``path`` can be used with, and what limits it.

    It is ``max_position_embeddings``, or shorter where rotary embeddings depend on the length of a sequence beyond it
    (:mod:`headrace.models.rope`). Raises :class:`~headrace.base.errors.ModelError`.
    """
    limit = context_limit(read_config(path))
    if limit is None:
        raise ModelError(
            f"model.path={path!r}: config.json does not say max_position_embeddings",
            remedy="add it to config.json, if docs/models.md says that this architecture works",
        )
    return limit


def context_length(path: str) -> int:
    """Return the longest context that the model of directory ``path`` can be used with, in tokens."""
    return limit_of(path).length


def model_directory(path: str) -> Path:
    """Return ``path`` as a directory that can be read. Raises :class:`~headrace.base.errors.ModelError`."""
    directory = Path(path)
    try:
        next(directory.iterdir(), None)
    except FileNotFoundError:
        raise ModelError(f"model.path={path!r} does not exist", remedy=REMEDY) from None
    except OSError as error:
        raise ModelError(f"model.path={path!r} cannot be read: {error.strerror}", remedy=REMEDY) from None
    return directory


class _Torch(ModuleType):
    """A stand-in for the module torch, put into a module of transformers, that imports torch when an attribute is first
    used."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real torch, which is imported for it."""
        return getattr(importlib.import_module("torch"), name)


def spare_torch() -> None:
    """Import transformers' readers of settings and tokenizers without torch, which would cost a process that computes
    nothing a second and 150 MB.

    transformers imports torch beside them for functions that its models call, and to convert the name of a dtype;
    with this patch, only if torch is already imported.
    """
    if "torch" in sys.modules or "transformers.configuration_utils" in sys.modules:
        return
    from transformers import utils

    known = utils.is_torch_available
    utils.is_torch_available = lambda: "torch" in sys.modules
    try:
        from transformers import modeling_rope_utils
    finally:
        utils.is_torch_available = known
    modeling_rope_utils.torch = _Torch("torch")
    from transformers import configuration_utils

    configuration_utils.is_torch_available = lambda: "torch" in sys.modules
