"""The reading and writing of a client's trained weights on the disk, optionally with the optimizer's state. Adapters
are stored in peft's format, and whole weights by the names of the model's parameters.

A directory is written under a temporary name, flushed, and renamed, so that an incomplete one never has the final name.
Its files have checksums, which are verified before a file is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import DataError
from headrace.learner.disk import CHECKSUMS_FILE, Damaged, listed_checksums, seal, verify
from headrace.models.heads import copy_later
from headrace.models.lora import CONFIG_FILE, WEIGHTS_FILE
from headrace.models.multilora import LoraTensors, from_tensors, to_peft
from headrace.models.weights import format_first, not_finite, to_file_format
from headrace.wings.tinker.weights import WeightKind, Weights, WholeTensors, trainable

STATE_FILE, FACTS_FILE = "training_state.safetensors", "tinker.json"
"""The files that peft does not read. The first contains the optimizer's moments and the gradients that no step has used
yet, the second the settings and the version of the model."""

OWN_FILES = frozenset({STATE_FILE, FACTS_FILE, CHECKSUMS_FILE})
"""The files that only this server reads."""
WHOLE_FILE = "model.safetensors"
"""The file of whole weights."""

SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 366 * 86400
"""The shortest and the longest time to live of a checkpoint."""

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightState:
    """The trained weights of a model with its settings and optimizer state, as :func:`write_state` writes and
    :func:`read_state` returns them."""

    weights: Weights
    spec: Mapping[str, Any]
    """The settings of the model that the weights belong to: ``base``, ``rank``, ``seed`` and ``parts``."""
    version: int
    """The number of optimizer steps that the weights have had."""
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    """The optimizer's state, and the gradients that no step has used; empty for weights alone."""


def check_name(name: str) -> str:
    """Validate and return the ``name`` of a checkpoint. Raises :class:`~headrace.base.errors.DataError` if it has other
    characters than letters, digits and ``. _ = -``, does not begin with a letter or digit, or has more than 128
    characters."""
    if not _NAME.fullmatch(name):
        raise DataError(
            f"the name {name[:80]!r} of a checkpoint", remedy="take letters, digits, and . _ = - (at most 128)"
        )
    return name


def check_ttl(ttl_s: int | None) -> int | None:
    """Validate and return the time to live of a checkpoint in seconds; ``None`` means that it never expires. Raises
    :class:`~headrace.base.errors.DataError` if it is outside :data:`SHORTEST_TTL_S` to :data:`LONGEST_TTL_S`."""
    if ttl_s is not None and not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:
        raise DataError(f"ttl_seconds={ttl_s}", remedy=f"set {SHORTEST_TTL_S} to {LONGEST_TTL_S}, or None")
    return ttl_s


def write_state(
    directory: Path, state: WeightState, *, base: str, prefixes: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Write ``state`` into ``directory``, whose former content is replaced; return the size of the files in bytes.

    ``base`` is the name of the base model, which is written into peft's settings of an adapter. ``prefixes``
    (:func:`~headrace.models.text_part.prefixes_in_base`) are only given for an adapter of a multimodal model that peft
    will load. :func:`read_state` cannot read such an adapter.
    """
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    facts: dict[str, Any] = {"spec": dict(state.spec), "version": state.version}
    if isinstance(state.weights, LoraTensors):
        facts["scale"] = state.weights.scale
        settings, tensors = to_peft(state.weights, base, prefixes)
        save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
        (unfinished / CONFIG_FILE).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    else:
        _save(state.weights.tensors, unfinished / WHOLE_FILE)
    (unfinished / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    if state.moments:
        _save(state.moments, unfinished / STATE_FILE)
    return _put_in_place(unfinished, directory)


def write_model(directory: Path, state: WeightState, model: PreTrainedModel, base: Path) -> int:
    """Write the whole weights ``state`` for a client to download, as a directory that transformers can load: with the
    configuration of ``model`` and the prediction heads of its checkpoint ``base``, and without a tokenizer. Return the
    size of the files in bytes."""
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model.config.save_pretrained(unfinished)
    save_file(to_file_format(model, state.weights.tensors), unfinished / WHOLE_FILE, metadata={"format": "pt"})
    copy_later(base, unfinished)
    facts = {"spec": dict(state.spec), "version": state.version}
    (unfinished / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    return _put_in_place(unfinished, directory)


def _put_in_place(unfinished: Path, directory: Path) -> int:
    """Add checksums to the directory ``unfinished``, wait until all of it is on the disk, and rename it to
    ``directory``, whose former content is deleted; return its size in bytes."""
    seal(unfinished)
    size = sum(map(_flush, unfinished.iterdir()))
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    _flush(directory.parent)
    return size


def read_state_facts(directory: Path) -> dict[str, Any]:
    """Return the settings (``spec``) and the ``version`` of the weights in ``directory``, without reading the weights.
    Raises :class:`~headrace.base.errors.DataError` for a missing or broken file."""
    try:
        listed = listed_checksums(directory)
        verify(directory, [FACTS_FILE] if listed else [])
        found: dict[str, Any] = json.loads((directory / FACTS_FILE).read_text(encoding="utf-8"))
        spec = found.get("spec") if isinstance(found, dict) else None
        if not isinstance(spec, dict) or not {"base", "rank", "parts", "seed"} <= spec.keys() or "version" not in found:
            raise ValueError(f"{FACTS_FILE} holds no settings of a model")
    except Damaged as error:
        raise _make_unreadable_error(directory, error.problem) from None
    except (OSError, ValueError) as error:
        raise _make_unreadable_error(directory, error) from None
    return found


def read_state(directory: Path, kind: WeightKind, device: torch.device, *, trained: bool, moments: bool) -> WeightState:
    """Return the weights in ``directory`` on ``device``, for a base that computes with weights of ``kind``; with
    ``trained`` they require gradients, and with ``moments`` the optimizer's state is read too. Raises
    :class:`~headrace.base.errors.DataError` for missing or broken files, for tensors that do not fit the stored
    settings, and for weights that are infinite or not a number."""
    facts = read_state_facts(directory)
    try:
        verify(directory)
        whole = (directory / WHOLE_FILE).exists()
        file = WHOLE_FILE if whole else WEIGHTS_FILE
        in_file = load_file(directory / file, device=str(device))
        loaded = {_own_name(key): tensor for key, tensor in in_file.items()}
        found = directory / STATE_FILE
        held = load_file(found, device=str(device)) if moments and found.exists() else {}
        _check_shapes(kind.list_shapes(facts["spec"]), loaded, held)
        scale, version = 1.0 if whole else float(facts["scale"]), int(facts["version"])
    except Damaged as error:
        raise _make_unreadable_error(directory, error.problem) from None
    except (KeyError, TypeError) as error:
        raise _make_unreadable_error(directory, f"{FACTS_FILE} lacks a setting ({error})") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise _make_unreadable_error(directory, error) from None
    if broken := not_finite(in_file):
        raise DataError(
            f"{file} of {directory.name} holds values that are infinite or not a number: {format_first(broken)}",
            remedy="load a checkpoint from before the training that wrote it diverged",
        )
    weights: Weights
    if whole:
        weights = WholeTensors(tensors={key: trainable(each) for key, each in loaded.items()} if trained else loaded)
    else:
        weights = from_tensors(loaded, rank=facts["spec"]["rank"], scale=scale, trained=trained)
    return WeightState(weights=weights, spec=facts["spec"], version=version, moments=held)


def _own_name(key: str) -> str:
    """Convert a tensor's name in a file of peft to the adapter's own name for it; return the name of a tensor of whole
    weights unchanged."""
    return key.removeprefix(_PREFIX).removesuffix(_SUFFIX) if key.startswith(_PREFIX) else key


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]
) -> None:
    """Raise ``ValueError`` unless ``weights`` have exactly the names and the ``shapes`` that their settings require,
    and the optimizer's ``moments`` have the shapes of their weights. A wrong tensor would later fail a pass that
    computes for all clients."""
    if odd := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"its tensors are not those of its settings: {format_first(odd)} in one of them only")
    found = {**weights, **{key: each for key, each in moments.items() if each.ndim}}  # a step count is a scalar
    for key, tensor in found.items():
        name = key.partition("/")[2] or key
        if (wanted := shapes.get(name)) != tuple(tensor.shape):
            raise ValueError(f"{key} has shape {list(tensor.shape)}, and its settings say {list(wanted or ())}")


def _make_unreadable_error(directory: Path, error: object) -> DataError:
    """Return the error for a checkpoint in ``directory`` that could not be read because of ``error``."""
    return DataError(f"{directory.name} cannot be read: {error}", remedy="load another checkpoint")


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write ``tensors``, a mapping by name, to a safetensors ``file``."""
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)


def _flush(path: Path) -> int:
    """Wait until the file or directory is on the disk, and return its size in bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
