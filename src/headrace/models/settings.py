"""The settings of a model directory, from its ``config.json``; every failure is raised as an error with a remedy.

Importing this module imports neither torch nor transformers. Reading settings imports transformers, but not torch.
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
from headrace.models.shape import RECURRENT_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REMEDY = (
    "give the directory of a Hugging Face causal language model: config.json, tokenizer, *.safetensors; or its name on "
    "a hub: OWNER/NAME"
)
"""The remedy for a directory that does not contain a model."""
LAYER_TYPES = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
        *RECURRENT_LAYERS,
        *("mlp", "moe"),
    }
)
"""The supported types of layers: with attention, with a recurrent state, or with neither."""
BUILDING = threading.RLock()
"""The lock that a thread must hold while transformers or peft builds a model. In this time they change global state of
the process: torch's default dtype, its random generator, and the method that ties weights. If two threads did this at
the same time, the second would later restore the values that the first had set."""


@contextmanager
def errors_naming(setting: str) -> Iterator[None]:
    """A context in which errors about a model directory name ``setting`` instead of ``model.path``."""
    try:
        yield
    except ModelError as error:
        problem, remedy = (text.replace("model.path", setting) for text in (error.problem, error.remedy))
        raise ModelError(problem, remedy=remedy) from error


def read_config(path: str) -> PreTrainedConfig:
    """Return the configuration of the model directory ``path``; for a multimodal checkpoint, that of its text part.

    Raises :class:`~headrace.base.errors.ModelError`, for example if there are several text parts.
    """
    return extract_text_config(path, read_whole_config(path))


def read_whole_config(path: str) -> PreTrainedConfig:
    """Return the configuration of the model directory ``path``, with all parts of a multimodal checkpoint."""
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
            _refuse_unknown_layers(path, tree)  # the error of transformers would suggest unsupported types
        corrected = "correct that setting, or copy config.json from where the model comes from"
        remedy = corrected if isinstance(error, StrictDataclassError) else REMEDY
        raise ModelError(f"{file} cannot be used: {error}", remedy=remedy) from error


def _refuse_unknown_layers(path: str, tree: dict[str, Any]) -> None:
    """Raise :class:`~headrace.base.errors.ModelError` if the settings ``tree`` contain unsupported types of layers."""
    for part in (tree, *(each for each in tree.values() if isinstance(each, dict))):
        if strange := sorted(set(map(str, part.get("layer_types") or ())) - LAYER_TYPES):
            raise ModelError(
                f"model.path={path!r} is a {part.get('model_type')}: it has layers of type {', '.join(strange)}",
                remedy=f"use a model whose layer_types are among {', '.join(sorted(LAYER_TYPES))}",
            )


def extract_text_config(path: str, whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text part of the multimodal model in the directory ``path``, whose configuration
    is ``whole``; ``whole`` itself for a text model.

    Raises :class:`~headrace.base.errors.ModelError` for a configuration with several text parts.
    """
    try:
        return whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelError(
            f"model.path={path!r} is a {whole.model_type}: its text part is ambiguous: {error}", remedy=SUPPORTED
        ) from None


def get_layer_values(config: PreTrainedConfig, name: str) -> list[Any]:
    """Return the different values of the setting ``name`` of ``config`` in the layers of a model. Most models have one
    value; several values exist if layers differ, such as the head sizes of Gemma 4. The result is ``[]`` if the model
    has no such setting."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = [getattr(layer, name, None) for layer in layers]
    flat = [each for value in found for each in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for place, value in enumerate(flat) if value is not None and value not in flat[:place]]


def num_later_layers(config: PreTrainedConfig) -> int:
    """Return the number of prediction heads of a checkpoint with the settings ``config``: layers behind the model's own
    that predict later tokens."""
    return int(getattr(config, "num_nextn_predict_layers", None) or 0)


def find_context_limit(path: str) -> ContextLimit:
    """Return the longest context with which the model in the directory ``path`` can be used, and the reason for the
    limit.

    It is ``max_position_embeddings``, or less if rotary embeddings depend on the length of longer sequences
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
    """Return the longest context with which the model in the directory ``path`` can be used, in tokens."""
    return find_context_limit(path).length


def model_directory(path: str) -> Path:
    """Return ``path`` as a readable directory. Raises :class:`~headrace.base.errors.ModelError` if it is not one."""
    directory = Path(path)
    try:
        next(directory.iterdir(), None)
    except FileNotFoundError:
        raise ModelError(f"model.path={path!r} does not exist", remedy=REMEDY) from None
    except OSError as error:
        raise ModelError(f"model.path={path!r} cannot be read: {error.strerror}", remedy=REMEDY) from None
    return directory


class _LazyTorch(ModuleType):
    """A replacement for the module torch inside a module of transformers. It imports torch when an attribute is first
    used."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of torch, which is imported if necessary."""
        return getattr(importlib.import_module("torch"), name)


def spare_torch() -> None:
    """Import transformers' readers of settings and tokenizers without torch. Importing torch would cost a process that
    does not compute with it one second and 150 MB.

    transformers imports torch in these modules for functions that its models call, and to convert the name of a dtype.
    With this patch, it imports torch only if torch is already imported.
    """
    if "torch" in sys.modules or "transformers.configuration_utils" in sys.modules:
        return
    from transformers import utils

    original_check = utils.is_torch_available
    utils.is_torch_available = lambda: "torch" in sys.modules
    try:
        from transformers import modeling_rope_utils
    finally:
        utils.is_torch_available = original_check
    modeling_rope_utils.torch = _LazyTorch("torch")
    from transformers import configuration_utils

    configuration_utils.is_torch_available = lambda: "torch" in sys.modules
