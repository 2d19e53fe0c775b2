"""The advice for a learner that runs out of memory: the settings that need less memory, and how much each would free.

The numbers are estimates (:mod:`headrace.learner.footprint`). They are accurate enough to choose a setting, but not to
use the last bytes of a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from headrace.base.errors import RunError
from headrace.learner.config import LearnerConfig
from headrace.learner.footprint import LearnerSizes, levers
from headrace.models.indexed import is_indexed
from headrace.models.packed import PADDED, ChosenAttention
from headrace.models.recurrent import recurrent_layers
from headrace.models.settings import get_layer_values
from headrace.models.shape import ModelShape, parse_shape
from headrace.models.weights import count_vocabulary, is_adapted

_SIZES = (
    *("num_key_value_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts"),
    *("num_experts_per_tok", "moe_intermediate_size"),
)
"""The settings of a model that are sizes, and that a model may lack."""


def compute_sizes(model: PreTrainedModel, config: LearnerConfig, attention: ChosenAttention = PADDED) -> LearnerSizes:
    """Return the sizes and settings that determine the memory of a learner of the loaded ``model``, which computes with
    the implementation ``attention``. Parameters are counted; other sizes are those of the model's configuration, the
    largest where layers differ."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapted, on_host = is_adapted(model), model.device.type == "cpu"
    kinds = () if attention.name == "flex" and not on_host else attention.layers
    return LearnerSizes(
        shape=msgspec.structs.replace(
            _shape_of_loaded(model),
            params=frozen if adapted else trained + frozen,
            whole_sequences=bool(recurrent_layers(model)) or is_indexed(model),
        ),
        config=config,
        itemsize=model.dtype.itemsize,
        adapter_params=float(trained) if adapted else 0.0,
        adapts_experts=adapted and any(".experts." in name for name, p in model.named_parameters() if p.requires_grad),
        on_host=on_host,
        score_layers=sum(
            kind.writes_scores(on_host=on_host, shares=config.share_prefixes is not False) for kind in kinds
        ),
    )


def _shape_of_loaded(model: PreTrainedModel) -> ModelShape:
    """Return the sizes of a loaded model. Sizes that its configuration lacks are estimated from the hidden size."""
    config = model.config
    hidden = int(config.hidden_size)
    tree: dict[str, Any] = {name: max(values) for name in _SIZES if (values := get_layer_values(config, name))}
    tree |= {
        "model_type": config.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": int(config.num_hidden_layers),
        "num_attention_heads": max(get_layer_values(config, "num_attention_heads"), default=1),
        "intermediate_size": max(get_layer_values(config, "intermediate_size"), default=4 * hidden),
        "vocab_size": count_vocabulary(model),
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "attn_logit_softcapping": next(iter(get_layer_values(config, "attn_logit_softcapping")), None),
    }
    return parse_shape(config.model_type, tree)


UNCHANGED = "there is no gradient, weights and optimizer are unchanged, and the batch can be given again"
HALF_UPDATED = "the update had begun, so that only a snapshot has whole weights: resume from the last one"
"""The descriptions of gradient and weights after a failure, for the error."""


@contextmanager
def explained_out_of_memory(sizes: LearnerSizes, step: int, state: str = UNCHANGED) -> Iterator[None]:
    """Return a context that converts an out-of-memory error into a :class:`~headrace.base.errors.RunError` about
    ``step``, which names settings that free memory. ``sizes`` are those of the learner, and ``state`` describes
    gradient and weights after the failure.

    The code inside the context must discard its tensors on failure.
    """
    reason = ""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error) or "no memory is left"
    except RuntimeError as error:  # torch has no narrower type for the host's memory
        if "can't allocate memory" not in str(error):
            raise
        reason = str(error)
    if reason:  # after the handlers, because the traceback keeps tensors alive
        if not sizes.on_host:
            torch.cuda.empty_cache()
        raise RunError(
            f"step {step} does not fit in memory: {reason.splitlines()[0]}; {state}",
            remedy=advice(sizes),
        )


def advice(sizes: LearnerSizes) -> str:
    """Return the settings that would free memory on a rank of a learner with ``sizes``, each with the approximate
    number of bytes that it frees."""
    named = [f"{setting}: about {format_bytes(freed)}" for setting, freed in levers(sizes).items()]
    return f"one of these frees memory on each rank: {'; '.join(named)}" if named else "take a device with more memory"


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` bytes in readable units.

    >>> format_bytes(3 * 2**30), format_bytes(1500)
    ('3.0 GiB', '1.5 KiB')
    """
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"
