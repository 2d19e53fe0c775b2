"""Adapters on the disk: directories in peft's format, with the optimizer's state beside it where it is wanted.

A directory is written under another name, flushed, and renamed, so that it is whole or not there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.base.errors import DataError
from headrace.models.lora import CONFIG_FILE, WEIGHTS_FILE
from headrace.models.multilora import LoraTensors, from_tensors, to_peft

STATE_FILE, FACTS_FILE = "training_state.safetensors", "tinker.json"
"""The files that peft does not read: the moments of the optimizer with gradients not yet used, and the settings."""

_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterState:
    """An adapter as it is on the disk."""

    lora: LoraTensors
    spec: Mapping[str, Any]
    """The settings with which it was created: base, rank, seed and parts."""
    version: int
    """The number of optimizer steps that it has had."""
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    """The optimizer's state, and the gradients that no step has used; empty for weights alone."""


def checked_name(name: str) -> str:
    """Return ``name``. Raises :class:`~headrace.base.errors.DataError` for one that is no name of a checkpoint."""
    if not _NAME.fullmatch(name):
        raise DataError(
            f"the name {name[:80]!r} of a checkpoint", remedy="take letters, digits, and . _ = - (at most 128)"
        )
    return name


def write_state(directory: Path, state: AdapterState, *, base: str) -> int:
    """Write ``state`` into ``directory``, which replaces an older one of that name; return its size in bytes."""
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    settings, tensors = to_peft(state.lora, base)
    save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
    (unfinished / CONFIG_FILE).write_text(json.dumps(settings, indent=1), encoding="utf-8")
    facts = {"spec": dict(state.spec), "version": state.version, "scale": state.lora.scale}
    (unfinished / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    if state.moments:
        save_file({name: tensor.contiguous() for name, tensor in state.moments.items()}, unfinished / STATE_FILE)
    size = sum(map(_flush, unfinished.iterdir()))
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)
    _flush(directory.parent)
    return size


def read_state(directory: Path, device: torch.device, *, trained: bool, moments: bool) -> AdapterState:
    """Return the adapter in ``directory`` on ``device``; ``trained`` says whether it gets gradients, ``moments``
    whether the optimizer's state is read. Raises :class:`~headrace.base.errors.DataError` for missing or broken
    files."""
    try:
        facts = json.loads((directory / FACTS_FILE).read_text(encoding="utf-8"))
        weights = load_file(directory / WEIGHTS_FILE, device=str(device))
        found = directory / STATE_FILE
        held = load_file(found, device=str(device)) if moments and found.exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{directory.name} cannot be read: {error}", remedy="load another checkpoint") from None
    names = {key.removeprefix(_PREFIX).removesuffix(_SUFFIX): tensor for key, tensor in weights.items()}
    lora = from_tensors(names, rank=facts["spec"]["rank"], scale=facts["scale"], trained=trained)
    return AdapterState(lora=lora, spec=facts["spec"], version=facts["version"], moments=held)


def _flush(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
