"""The command ``headrace tinker``: read its options, and print what the client needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.base.errors import ConfigError
from headrace.run.cli.commands import USE, Verb
from headrace.run.cli.output import console, starting

if TYPE_CHECKING:
    from headrace.wings.tinker.config import TinkerConfig


def tinker(
    model: Path = typer.Argument(help="Directory of a Hugging Face causal language model.", metavar="MODEL_DIR"),
    name: list[str] = typer.Option(
        [],
        metavar="NAME[=DIR]",
        help="A name under which clients may ask for the model, such as Qwen/Qwen3-8B (repeat).",
    ),
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; others than this machine then need the key alone."
    ),
    port: int = typer.Option(8642, help="Port to listen on; 0 for a free one."),
    state: Path = typer.Option(Path("tinker-state"), help="Directory of the journal, the checkpoints and the key."),
    device: str = typer.Option("auto", help="cpu, cuda or cuda:N; auto: cuda where there is one."),
    max_rank: int = typer.Option(256, help="The largest rank of an adapter.", min=1),
    max_models: int = typer.Option(256, help="The most models of sessions that have not ended.", min=1),
    max_resident: int = typer.Option(32, help="The most idle adapters in memory; others move to the disk.", min=1),
) -> None:
    """Serve the Tinker protocol: its unmodified client and cookbook train and sample on this machine."""
    starting(f"loading what it takes to serve {model}")
    from headrace.base.clock import RealClock
    from headrace.base.heap import gc_disabled
    from headrace.wings.tinker.config import TinkerConfig

    path = model.expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(
            f"there is no directory {path}",
            remedy="give the directory of a Hugging Face causal language model: config.json, tokenizer, *.safetensors",
        )
    with gc_disabled():
        from headrace.wings.tinker.run import key_of, serve

    config = TinkerConfig(
        model=path,
        names=tuple(dict.fromkeys([*(_named(each, path) for each in name), path.name, str(path)])),
        state=state.expanduser().resolve(),
        host=host,
        port=port,
        device=device,
        max_rank=max_rank,
        max_models=max_models,
        max_resident=max_resident,
    )
    key = key_of(config.state)
    serve(config, key, clock=RealClock(), serving=lambda url: _say_serving(config, url, key))


def _say_serving(config: TinkerConfig, url: str, key: str) -> None:
    """Print what is served, and what the shell of the client needs."""
    lines = [
        f"serving    {', '.join(config.names[:-1])}",
        f"state      {config.state}",
        "\nIn the shell of the client:",
        f"  export TINKER_BASE_URL={url}",
        f"  export TINKER_API_KEY={key}",
        "\nend it     Ctrl-C",
    ]
    console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _named(given: str, path: Path) -> str:
    """Return the name in ``NAME`` or ``NAME=DIR``. Raises :class:`~headrace.base.errors.ConfigError` for another
    directory: a server has one base."""
    name, _, directory = given.partition("=")
    if directory and Path(directory).expanduser().resolve() != path:
        raise ConfigError(
            f"--name {given}: this server's base is {path}", remedy="start another server for another base"
        )
    if not name:
        raise ConfigError(f"--name {given} has no name", remedy="give NAME, such as Qwen/Qwen3-8B")
    return name


VERB = Verb(run=tinker, group=USE, place=35)
