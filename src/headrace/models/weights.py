"""The tensors of a model that are trained and transferred from the learner to the engines, and checks of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace.base.errors import ModelError

DEFAULT = "default"
"""The name of the policy's adapter, the only adapter of most models."""

CORRECTION_BIAS = "e_score_correction_bias"
"""The name of the tensor that routers add to the scores of experts for their choice, in every family with such a tensor
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2). It is a buffer or, in a few families, a parameter without a gradient."""

_LORA = "lora_"
"""The prefix of the names that peft adds to a layer. The next part of a tensor's name is the name of the adapter."""


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter of ``model`` once, by name, in the order of its modules; a tied parameter under its first
    name. Correction biases of routers that are buffers follow.

    For a model with adapters, only the trained parameters are returned, since the others never change and need not be
    transferred. Names of the policy's adapter, or of the only adapter, do not contain the adapter's name; names of
    agents' adapters do.

    The tensors are the parameters themselves: setting one to other memory (``tensor.data = view``) changes the model
    wherever the parameter is tied.

    >>> layer = nn.Linear(2, 3)
    >>> {name: tuple(tensor.shape) for name, tensor in weight_tensors(layer).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=True))
    if not is_adapted(model):
        return tensors | correction_biases(model)
    trained = {name: tensor for name, tensor in tensors.items() if belongs_to_adapter(name) and tensor.requires_grad}
    if len({parse_adapter_name(name) for name in trained}) == 1:
        return {remove_adapter_name(name): tensor for name, tensor in trained.items()}
    return {
        remove_adapter_name(name) if parse_adapter_name(name) == DEFAULT else name: tensor
        for name, tensor in trained.items()
    }


def correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return the correction biases of a mixture's routers by name, which have no gradient; empty for a model with
    adapters, whose base never changes."""
    if is_adapted(model):
        return {}
    fixed = (each for each in model.named_parameters() if not each[1].requires_grad)
    return {name: tensor for name, tensor in (*model.named_buffers(), *fixed) if name.endswith(CORRECTION_BIAS)}


def fixed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of ``model`` that are in its files and that training does not change, by name, such as a scale
    of each layer; empty for a model with adapters, whose files contain only the adapters."""
    if is_adapted(model):
        return {}
    in_files, changing = model.state_dict().keys(), correction_biases(model)
    return {name: one for name, one in model.named_buffers() if name in in_files and name not in changing}


def to_file_format(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` of ``model`` with the names and shapes of the model's files, which may have, for example, one
    tensor per expert."""
    from transformers.core_model_loading import revert_weight_conversion

    if not tensors:
        return {}
    reverted: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def refuse_not_finite(model: nn.Module, path: str) -> None:
    """Raise :class:`~headrace.base.errors.ModelError`, which names the tensors, if parameters of ``model`` or
    correction biases of its routers contain infinite values or NaN. ``path`` is the directory from which they were
    loaded.

    Each tensor is read once and not copied. Other buffers are not checked, because masks may contain -inf. For a
    sharded tensor, this rank's shard is checked.
    """
    found = not_finite(dict(model.named_parameters()) | correction_biases(model))
    if found:
        raise ModelError(
            f"the weights of model.path={path!r} are infinite or not a number: {format_first(found)}",
            remedy="copy or fetch the files again; if they were written so, take a checkpoint from before the training "
            "that wrote them diverged",
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors with infinite values or NaN, each as its name and the number of such values. For a sharded
    tensor, this rank's shard is checked.

    >>> not_finite({"up": torch.tensor([1.0, torch.nan, torch.inf]), "down": torch.ones(2)})
    ['up (2 of 3 values)']
    """
    found = []
    for name, tensor in tensors.items():
        part = tensor.detach()
        part = part.to_local() if isinstance(part, DTensor) else part
        comparable = part.is_floating_point() and part.element_size() > 1  # no float8
        if comparable and part.numel() and not part.is_meta and not all(map(torch.isfinite, torch.aminmax(part))):
            found.append(f"{name} ({int((~torch.isfinite(part)).sum())} of {part.numel()} values)")
    return found


def format_first(names: Sequence[str]) -> str:
    """Return the first five of ``names`` as text, with the number of further elements.

    >>> format_first(["a", "b"]), format_first(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def model_bytes(model: nn.Module) -> int:
    """Return the size of all parameters in bytes.

    >>> model_bytes(nn.Linear(2, 3))
    36
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has adapters, which are trained instead of the model itself."""
    return any(belongs_to_adapter(name) for name, _ in model.named_parameters())


def remove_adapter_name(name: str) -> str:
    """Return the name of an adapter's parameter without the adapter's name.

    >>> remove_adapter_name("layers.0.q_proj.lora_A.default.weight")
    'layers.0.q_proj.lora_A.weight'
    """
    parts = name.split(".")
    at = _place(parts)
    return ".".join([*parts[:at], *parts[at + 1 :]])


def parse_adapter_name(name: str) -> str:
    """Return the name of the adapter that a parameter belongs to.

    >>> parse_adapter_name("layers.0.q_proj.lora_A.default.weight")
    'default'
    """
    parts = name.split(".")
    return parts[_place(parts)]


def belongs_to_adapter(name: str) -> bool:
    """Return whether peft has added the parameter or module with this name."""
    return any(part.startswith(_LORA) for part in name.split("."))


def _place(parts: list[str]) -> int:
    """Return the index of the adapter's name in ``parts``, the parts of a parameter's name."""
    return next(place for place, part in enumerate(parts) if part.startswith(_LORA)) + 1


def count_vocabulary(model: nn.Module) -> int:
    """Return the number of tokens that ``model`` can both read and score. Some models embed further tokens, which
    represent images, and for which their heads have no logits."""
    known: Any = model
    return min(int(known.get_input_embeddings().num_embeddings), int(known.config.vocab_size))
