"""What the commands of all servers have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ConfigError
from headrace.models.config import LoraConfig
from headrace.wings.servers.client.config import ServerConfig

_ASK = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
ASK_S = 60.0
"""Longest that an interpreter may take to say what is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequirements:
    """What a server has to serve."""

    path: str
    """Directory of the model."""
    dtype: str
    max_context: int
    """Tokens of prompt and answer."""
    lora: LoraConfig | None = None
    """The adapters that are trained beside it; ``None``: it is trained itself, or nothing is."""
    record_kept: bool = False
    """Whether the server is to tell what each token was drawn from."""
    record_routing: bool = False
    """Whether it is to tell the experts of each token."""
    sleeps: bool = False
    """Whether it is to give its memory back while a learner computes."""


def model_alone(path: str, directory: Path) -> str:
    """The model in the directory ``path``, for servers that read every safetensors file they see: where others lie
    beside it (a snapshot's optimizer), a directory of links below ``directory`` to all but those."""
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
    """Of the environment that the server is installed in."""
    return server.python or sys.executable


def installed(server: ServerConfig, package: str) -> str:
    """The version of ``package`` in the server's environment; nothing of it is imported.

    Raises :class:`~headrace.base.errors.ConfigError` where it is not there.
    """
    python = interpreter(server)
    try:
        told = subprocess.run(
            [python, "-c", _ASK, package], capture_output=True, text=True, check=False, timeout=ASK_S
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"engine.server.python={python!r} cannot be asked for its {package}: {error}",
            remedy="give the interpreter of the environment that it is installed in",
        ) from None
    if told.returncode:
        raise ConfigError(
            f"engine.server.python={python!r} has no distribution {package!r}",
            remedy=f"pip install {package} in an environment of its own, and set engine.server.python to its "
            "interpreter; docs/engines.md says how",
        )
    return told.stdout.strip()


def refuse_untested(name: str, version: str, tested: tuple[str, ...], *, any_version: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a version of which nobody knows whether it keeps the
    contract."""
    if any_version or any(version == known or version.startswith(f"{known}.") for known in tested):
        return
    known = f"tested are {', '.join(tested)}" if tested else "no version was tested, but for a fake of its API"
    raise ConfigError(
        f"{name} {version} was not tested: {known}",
        remedy="take a version that was; or set engine.server.any_version = true, and run the contract suite "
        "(docs/engines.md)",
    )
