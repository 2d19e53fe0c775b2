"""The catalogue of accelerators and models by name, read from ``hardware.toml`` and ``models.toml`` beside this
file.

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
from headrace.models.hub import is_hub_name, local_directory, short_model_name
from headrace.models.shape import ModelShape, parse_shape

DEFAULT_HOST = "DGX-H100"
"""Name of the machine in the catalogue whose figures are used for an accelerator without a ``host``."""


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device, such as a GPU, with its manufacturer's figures."""

    name: str
    peak_tflops: float
    """Peak rate in 10¹² dense operations per second, in bfloat16; for processors in float32."""
    bandwidth_gb_s: float
    """Memory bandwidth in 10⁹ bytes per second."""
    memory_gb: float
    """Memory in 10⁹ bytes."""
    overhead_ms: float = 2.0
    """Fixed time of an engine step in milliseconds, in addition to reading memory and computing."""
    host: str = DEFAULT_HOST
    """Name of the machine in the catalogue whose figures a plan uses for the machines with this device."""


class HostFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of machine with accelerators: the rates of its processors, its memory and its network, from which the time
    of a publication is computed. Rates are in 10⁹ bytes per second."""

    cores: int | None = None
    """Number of cores; ``None``: the machine's accelerators are its cores, so that both numbers are equal."""
    memory_gb: float | None = None
    """Memory in 10⁹ bytes; ``None``: not known."""
    memory_gb_s: float
    """Rate at which all cores together read and write memory."""
    link_gb_s: float
    """Rate of one link to the network, in each direction; in a plan, ``cluster.network_gb_s``."""
    links: int
    """Number of network links over which the connections for the weights are distributed."""
    stream_gb_s: float
    """Rate of one connection; one thread serves each of its ends."""
    hash_gb_s: float
    """Rate at which one thread hashes."""
    copy_gb_s: float
    """Rate at which one thread copies memory."""
    down_gb_s: float
    """Rate of a copy from one accelerator to host memory that is not page-locked."""
    up_gb_s: float
    """Rate of a copy from host memory that is not page-locked to one accelerator."""
    load_gb_s: float
    """Rate at which a model server (vLLM, SGLang) loads the weights from files, per accelerator of the server."""
    load_most_gb_s: float
    """The largest rate at which all model servers of one machine together load weights from files."""


@cache
def accelerators() -> Mapping[str, Accelerator]:
    """Return all accelerators of the catalogue by name."""
    rows = {name: row for name, row in _read_toml("hardware.toml").items() if name != "hosts"}
    return {name: msgspec.convert({"name": name, **row}, Accelerator) for name, row in rows.items()}


@cache
def hosts() -> Mapping[str, HostFigures]:
    """Return the figures of all machines of the catalogue by name."""
    return {name: msgspec.convert(row, HostFigures) for name, row in _read_toml("hardware.toml")["hosts"].items()}


def accelerator(name: str) -> Accelerator:
    """Return the accelerator called ``name``, regardless of case; raise :class:`~headrace.base.errors.ConfigError` if
    the catalogue lacks it."""
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
    """Return the sizes of all models of the catalogue by name."""
    return {name: parse_shape(name, row) for name, row in _read_toml("models.toml").items()}


def model(path: str) -> ModelShape:
    """Return the sizes of the model ``path``: a directory with a ``config.json``, a hub name, or the name of a model of
    the catalogue. The owner in a hub name is ignored for the catalogue's models.

    Raises :class:`~headrace.base.errors.ConfigError` if no such model is found, or if its ``config.json`` is invalid.
    """
    name = short_model_name(path).casefold()
    unknown = name not in models() and is_hub_name(path)
    file = Path(local_directory(path, weights=False) if unknown else path) / "config.json"
    if file.is_file():
        try:
            return parse_shape(short_model_name(path), json.loads(file.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ConfigError(f"{file} does not say what the model is made of: {error}", remedy=_REMEDY) from None
    if name not in models():
        raise ConfigError(
            f"model.path={path!r} is not a directory with a config.json, and {Path(path).name!r} is not in "
            "the catalogue",
            remedy=f"{nearest(name, models())}; or give a directory with the config.json of the model",
        )
    return models()[name]


_REMEDY = "name a model of the catalogue, or a directory with the config.json of a decoder-only model"


def _read_toml(name: str) -> dict[str, dict[str, Any]]:
    """Return the content of the catalogue's TOML file ``name``: a table for each accelerator or model, by its name."""
    return tomllib.loads((files(__name__) / name).read_text(encoding="utf-8"))
