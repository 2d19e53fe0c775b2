"""The files of the learner in a snapshot: a Hugging Face model directory, and a file with the optimizer's state. For a
model with an adapter it is a directory of peft with the adapter; the adapters of agents are in ``agents/NAME``.

Nothing is pickled: tensors and numbers are stored as safetensors. The schedule is a function of the step and needs no
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.base.errors import CheckpointError, ModelError
from headrace.learner.disk import SLACK_BYTES, copy_tokenizer, seal, whole_or_nothing
from headrace.learner.parallel.shards import local_shard
from headrace.models import ModelConfig, load_model
from headrace.models.config import AGENTS
from headrace.models.heads import copy_later, later_bytes
from headrace.models.weights import is_adapted, weight_tensors

OPTIMIZER_FILE = "optimizer.safetensors"

_RANDOM_STATE = "random_state.cpu"
_STEP = "step"


AuxiliaryFiles = Mapping[str, dict[str, Tensor]]
"""Further files of a snapshot: the tensors of each file, by file name and tensor name."""


def num_bytes(model: nn.Module, moments: Mapping[str, Tensor], auxiliary_files: AuxiliaryFiles) -> int:
    """Return the approximate size in bytes of a snapshot with the model, the optimizer's ``moments`` and the further
    files ``auxiliary_files``."""
    tensors = [
        *weight_tensors(model).values(),
        *moments.values(),
        *(t for file_tensors in auxiliary_files.values() for t in file_tensors.values()),
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SLACK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The contents of a snapshot besides the weights and the optimizer's moments, for :func:`save`."""

    step: int
    """The number of steps before the snapshot."""
    model_dir: Path
    """The directory from which the tokenizer's files and the prediction heads, which are not trained, are copied."""
    auxiliary_files: AuxiliaryFiles
    """The files with the tensors of the auxiliary models."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Further numbers for the metadata of the optimizer's file."""


def save(directory: Path, model: PreTrainedModel, moments: Mapping[str, Tensor], extras: Extras) -> None:
    """Write all files of the learner of ``model``, with ``extras``, into the existing ``directory``, and flush them.
    ``moments`` are the optimizer's tensors, labelled ``weight|key``.

    Raises :class:`~headrace.base.errors.CheckpointError` on failure; the directory is then removed.
    """
    adapted = is_adapted(model)
    more_bytes = 0 if adapted else later_bytes(extras.model_dir)
    with whole_or_nothing(directory, num_bytes(model, moments, extras.auxiliary_files) + more_bytes):
        if adapted:
            from headrace.models import lora

            for agent in lora.Switch(model).agents:
                where = directory / AGENTS / agent if agent else directory
                where.mkdir(parents=True, exist_ok=True)
                lora.save_adapter(model, where, agent)
        else:
            model.save_pretrained(directory)
            copy_later(extras.model_dir, directory)
        copy_tokenizer(extras.model_dir, directory)
        numbers = {name: str(number) for name, number in {_STEP: extras.step, **extras.numbers}.items()}
        tensors = {**moments, _RANDOM_STATE: torch.get_rng_state()}
        save_file(tensors, directory / OPTIMIZER_FILE, metadata=numbers)
        for file, file_tensors in extras.auxiliary_files.items():
            save_file(file_tensors, directory / file)
        seal(directory)


def restore_weights(
    directory: Path, model: PreTrainedModel, load: Callable[[ModelConfig], nn.Module] = load_model
) -> None:
    """Copy the weights of the snapshot ``directory`` into ``model``, in place. ``load`` loads a second model, which is
    sharded like ``model``.

    Raises :class:`~headrace.base.errors.CheckpointError` if they cannot be read or belong to another model.
    """
    if is_adapted(model):
        _restore_adapter(directory, model)
        return
    model_tensors = weight_tensors(model)
    dtype: Any = str(model.dtype).removeprefix("torch.")
    try:
        saved = weight_tensors(load(ModelConfig(path=str(directory), dtype=dtype)))
    except ModelError as error:
        raise CheckpointError(
            f"snapshot {directory} holds no usable weights: {error.problem}", remedy="resume from an older snapshot"
        ) from error
    if {name: tensor.shape for name, tensor in model_tensors.items()} != {name: t.shape for name, t in saved.items()}:
        raise other_model_error(directory, model)
    with torch.no_grad():
        for name, tensor in model_tensors.items():
            local_shard(tensor.detach()).copy_(local_shard(saved[name].detach()))


def other_model_error(directory: Path, model: PreTrainedModel) -> CheckpointError:
    """Return the error for weights in ``directory`` that do not belong to ``model``."""
    return CheckpointError(
        f"the weights in {directory} are of another model than {type(model).__name__} as configured",
        remedy="resume with the model.path that the run was started with",
    )


def _restore_adapter(directory: Path, model: PreTrainedModel) -> None:
    """Load the adapters of all agents from the snapshot in ``directory`` into ``model``. Raises
    :class:`~headrace.base.errors.CheckpointError` if the snapshot does not contain them."""
    from headrace.models import lora

    try:
        for agent in lora.Switch(model).agents:
            lora.load_adapter(model, lora.get_adapter_directory(directory, agent), agent)
    except ModelError as error:
        raise CheckpointError(
            f"snapshot {directory} holds no adapter of this run: {error.problem}",
            remedy="resume with the model.path and model.lora that the run was started with, or from an older snapshot",
        ) from error


def restore_optimizer(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the optimizer's moments and torch's random state from ``directory``, and return the number of steps
    before the snapshot. Learning rates and decays are not restored, since the configuration sets them.

    Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged or belongs to another
    model.
    """
    path = directory / OPTIMIZER_FILE
    try:
        with safe_open(path, framework="pt") as file:
            step = int(file.metadata()[_STEP])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", remedy="resume from an older snapshot, or train again"
        ) from None
    random_state = tensors.pop(_RANDOM_STATE)
    numbers = {name: number for number, name in enumerate(_names(model, optimizer))}
    states: dict[int, dict[str, Tensor]] = {}
    for label, tensor in tensors.items():
        name, _, key = label.partition("|")
        if name not in numbers:
            raise CheckpointError(
                f"{path} holds moments of {name}, which this model does not train",
                remedy="resume with the model that the snapshot was made from",
            )
        states.setdefault(numbers[name], {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(random_state)
    return step


def collect_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors of all parameters of ``model``, labelled ``parameter's name|key``; empty before
    the first update."""
    names = _names(model, optimizer)
    states: Mapping[int, Mapping[str, Tensor]] = optimizer.state_dict()["state"]
    return {
        f"{names[number]}|{key}": value.contiguous() for number, state in states.items() for key, value in state.items()
    }


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the order of its state."""
    names = {parameter: name for name, parameter in weight_tensors(model).items()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
