"""Accelerators and models that are known by name: tables of ``hardware.toml`` and ``models.toml`` beside this file.

>>> accelerator("h100").memory_gb, round(model("qwen3-8b").params / 1e9, 1)
(80.0, 8.2)
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import ConfigError, nearest
from headrace.models.hub import called, is_hub_name, local_directory
from headrace.wings.plan.catalogue.shape import ModelShape, shape_of


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device: what its maker says of it."""

    name: str
    peak_tflops: float
    """10¹² operations a second, dense, in bfloat16; of processors in float32."""
    bandwidth_gb_s: float
    """10⁹ bytes a second from its memory."""
    memory_gb: float
    """10⁹ bytes."""
    overhead_ms: float = 2.0
    """Of a step of an engine, beside what reading and computing take."""


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """All of them, by name."""
    return {name: msgspec.convert({"name": name, **row}, Accelerator) for name, row in _table("hardware.toml").items()}


def accelerator(name: str) -> Accelerator:
    """The one of that name, however it is written; :class:`~headrace.base.errors.ConfigError` asks for what is not
    known."""
    known = {each.casefold(): each for each in accelerators()}
    if name.casefold() not in known:
        raise ConfigError(
            f"cluster.accelerator={name!r} is not in the catalogue, and three numbers of it are needed",
            remedy="set cluster.peak_tflops (dense, in bfloat16), cluster.bandwidth_gb_s (of its memory) and "
            f"cluster.memory_gb; {nearest(name, accelerators())}",
        )
    return accelerators()[known[name.casefold()]]


@cache
def models() -> Mapping[str, ModelShape]:
    """All of them, by name."""
    return {name: shape_of(name, row) for name, row in _table("models.toml").items()}


def model(path: str) -> ModelShape:
    """The model in the directory ``path``; where that is none, the one of that name, whoever's it is.

    Raises :class:`~headrace.base.errors.ConfigError` where there is neither.
    """
    name = called(path).casefold()
    unknown = name not in models() and is_hub_name(path)
    file = Path(local_directory(path, weights=False) if unknown else path) / "config.json"
    if file.is_file():
        try:
            return shape_of(called(path), json.loads(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ConfigError(f"{file} does not say what the model is made of: {error}", remedy=_REMEDY) from None
    if name not in models():
        raise ConfigError(
            f"model.path={path!r} is no directory with a config.json, and {Path(path).name!r} is not in the catalogue",
            remedy=f"{nearest(name, models())}; or give a directory with the config.json of the model",
        )
    return models()[name]


_REMEDY = "name a model of the catalogue, or a directory with the config.json of a decoder-only model"


def _table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((files(__name__) / name).read_text(encoding="utf-8"))
