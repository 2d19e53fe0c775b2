"""The parts that the start commands of all servers share. A server such as vLLM is installed in a Python environment,
Headrace's own or another one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.models.config import LoraConfig
from headrace.wings.servers.client.config import ServerConfig

_PRINT_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
INSTALLED_S = 60.0
"""Longest wait for an interpreter to print the version of a package, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequirements:
    """The model that a server must serve, and the records that it must make."""

    path: str
    """Directory of the model."""
    dtype: str
    """Name of the dtype of the weights, such as ``bfloat16``."""
    max_context: int
    """Largest number of tokens of a prompt and its answer together."""
    lora: LoraConfig | None = None
    """The adapters that are trained; ``None`` if the model itself is trained, or nothing is."""
    record_kept: bool = False
    """Whether the server must report the kept-set of each token."""
    record_routing: bool = False
    """Whether the server must report the experts of each token."""
    sleeps: bool = False
    """Whether the server must release its memory while a learner computes."""


def model_alone(path: str, directory: Path) -> str:
    """Return a directory with the model in ``path`` and no other safetensors files, since servers load all safetensors
    files of a directory. If ``path`` has other ones, such as an optimizer's state, create a directory of links below
    ``directory`` and return it; otherwise return ``path``."""
    source = Path(path).resolve()
    index = source / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    others = {file.name for file in source.glob("*.safetensors")} - names
    if not others:
        return path
    view = directory / "model" / source.name
    view.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in others:
            (view / file.name).symlink_to(file)
    return str(view)


def interpreter(server: ServerConfig) -> str:
    """Return the Python interpreter of the environment in which the server is installed."""
    return server.python or sys.executable


def installed_version(server: ServerConfig, package: str) -> str:
    """Return the version of ``package`` in the server's environment, without importing the package.

    Raises :class:`~headrace.base.errors.ConfigError` if it is not installed.
    """
    python = interpreter(server)
    try:
        result = subprocess.run(
            [python, "-c", _PRINT_VERSION, package], capture_output=True, text=True, check=False, timeout=INSTALLED_S
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine.server.python={python!r} cannot be asked for its {package}: {error}",
            remedy="give the interpreter of the environment that it is installed in",
        ) from None
    if result.returncode:
        raise ConfigError(
            f"engine.server.python={python!r} has no distribution {package!r}",
            remedy=f"pip install {package} in an environment of its own, and set engine.server.python to its "
            "interpreter; docs/engines.md says how",
        )
    return result.stdout.strip()


def refuse_untested(name: str, version: str, tested: tuple[str, ...], *, any_version: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a ``version`` of the server ``name`` that is none of the
    ``tested`` ones (``0.32`` stands for all ``0.32.x``), unless ``any_version`` is set."""
    if any_version or any(version == known or version.startswith(f"{known}.") for known in tested):
        return
    known = f"tested are {', '.join(tested)}" if tested else "no version was tested, but for a fake of its API"
    raise ConfigError(
        f"{name} {version} was not tested: {known}",
        remedy="take a version that was; or set engine.server.any_version = true, and run the contract suite "
        "(docs/engines.md)",
    )
