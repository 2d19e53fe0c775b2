"""The tensors that are trained, and travel from the learner to the engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

DEFAULT = "default"
"""What the adapter of a model with one is called: the policy's."""

_LORA = "lora_"
"""How peft begins the names of what it adds to a layer; the name of the adapter follows as a part of its own."""


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of ``model`` once, by name, in the order of its modules; a tied one under its first name.

    Of a model with adapters: those that are trained. The policy's, or that of the only one, are under names that do not
    say what the adapter is called; those of agents that are trained beside it say so. The rest never changes, so it
    need not travel.

    The tensors are the parameters themselves: pointing one elsewhere (``tensor.data = view``) changes the model, in
    every place where the parameter is tied.

    >>> layer = nn.Linear(2, 3)
    >>> {name: tuple(tensor.shape) for name, tensor in weight_tensors(layer).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=True))
    if not is_adapted(model):
        return tensors
    trained = {name: tensor for name, tensor in tensors.items() if of_adapter(name) and tensor.requires_grad}
    if len({adapter_of(name) for name in trained}) == 1:
        return {without_adapter(name): tensor for name, tensor in trained.items()}
    return {without_adapter(name) if adapter_of(name) == DEFAULT else name: tensor for name, tensor in trained.items()}


def kept_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of ``model`` under the names, and in the shapes, in which such models are kept in files: one tensor
    for each expert, say."""
    from transformers.core_model_loading import revert_weight_conversion

    if not tensors:
        return {}
    reverted: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def model_bytes(model: nn.Module) -> int:
    """Of all parameters.

    >>> model_bytes(nn.Linear(2, 3))
    36
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def is_adapted(model: nn.Module) -> bool:
    """Whether adapters are trained, and not the model itself."""
    return any(of_adapter(name) for name, _ in model.named_parameters())


def without_adapter(name: str) -> str:
    """
    >>> without_adapter("layers.0.q_proj.lora_A.default.weight")
    'layers.0.q_proj.lora_A.weight'
    """
    parts = name.split(".")
    at = _place(parts)
    return ".".join([*parts[:at], *parts[at + 1 :]])


def adapter_of(name: str) -> str:
    """
    >>> adapter_of("layers.0.q_proj.lora_A.default.weight")
    'default'
    """
    parts = name.split(".")
    return parts[_place(parts)]


def of_adapter(name: str) -> bool:
    """Whether a parameter or module of this name was added by peft."""
    return any(part.startswith(_LORA) for part in name.split("."))


def _place(parts: list[str]) -> int:
    """Of the adapter's name among the parts of a parameter's."""
    return next(place for place, part in enumerate(parts) if part.startswith(_LORA)) + 1
