"""The command ``headrace tinker``: read its options, and print what the client needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.base.errors import ConfigError
from headrace.run.cli.commands import USE, Verb
from headrace.run.cli.output import console, starting

if TYPE_CHECKING:
    from headrace.wings.tinker.config import BaseConfig, TinkerConfig


def tinker(
    model: str = typer.Argument(
        help="Directory of a Hugging Face causal language model, or its name on a hub.", metavar="MODEL"
    ),
    name: list[str] = typer.Option(
        [],
        metavar="NAME[=DIR]",
        help="A name under which clients may request the model, such as Qwen/Qwen3-8B, or for another in DIR (repeat).",
    ),
    whole: list[str] = typer.Option(
        [],
        metavar="NAME[=DIR]",
        help="A name under which one client at a time trains all weights, of the model or of one in DIR (repeat).",
    ),
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; others than this machine then need the key alone."
    ),
    port: int = typer.Option(8642, min=0, max=65535, help="Port to listen on; 0 for a free one."),
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

    bases = make_bases(model, name, whole)
    with gc_disabled():
        from headrace.wings.tinker.run import read_or_create_key, serve

    config = TinkerConfig(
        bases=bases,
        state=state.expanduser().resolve(),
        host=host,
        port=port,
        device=device,
        max_rank=max_rank,
        max_models=max_models,
        max_resident=max_resident,
    )
    key = read_or_create_key(config.state)
    serve(config, key, clock=RealClock(), on_serving=lambda url: _say_serving(config, url, key))


def _say_serving(config: TinkerConfig, url: str, key: str) -> None:
    """Print the bases, the state directory, and the two environment variables that the client's shell must set: the
    server's ``url`` and its ``key``."""
    lines = [
        *(f"serving    {base.path} as {', '.join(base.names)}{_WHOLE_NOTE[base.whole]}" for base in config.bases),
        f"state      {config.state}",
        "\nIn the shell of the client:",
        f"  export TINKER_BASE_URL={url}",
        f"  export TINKER_API_KEY={key}",
        "\nend it     Ctrl-C",
    ]
    console().print("\n".join(lines), highlight=False, soft_wrap=True)


def make_bases(model: str, names: Sequence[str], whole: Sequence[str] = ()) -> tuple[BaseConfig, ...]:
    """Return the bases of a server: the ``model``, and those that ``--name NAME=DIR`` and ``--whole NAME=DIR`` add.

    ``names`` are the values of ``--name``, for bases whose clients train adapters. ``whole`` are the values of
    ``--whole``, for bases of which one client at a time trains all weights. A value without ``=DIR`` names ``model``.
    If only ``--whole`` names ``model``, it is not loaded for adapters too. Further names are the text of ``model``, the
    last part of each model's path or hub name, and each path, unless another base has that name.

    Raises :class:`~headrace.base.errors.ConfigError` for a value without a name and for a name that is given twice for
    different bases, and :class:`~headrace.base.errors.ModelError` for a hub name whose model cannot be had.
    """
    from headrace.models.hub import short_model_name
    from headrace.wings.tinker.config import BaseConfig

    main = _find_directory(model, "MODEL")
    named: dict[str, tuple[Path, bool]] = {}
    for option, each in [*(("--name", one) for one in names), *(("--whole", one) for one in whole)]:
        name, _, directory = each.partition("=")
        path = _find_directory(directory, f"{option} {each}") if directory else main
        if not name:
            raise ConfigError(f"{option} {each} has no name", remedy="give NAME, such as Qwen/Qwen3-8B")
        base = path, option == "--whole"
        if named.setdefault(name, base) != base:
            raise ConfigError(f"{option} {each}: {name} is {named[name][0]}", remedy="give each name once")
    main_is_whole = (main, True) in named.values() and (main, False) not in named.values()
    bases = list(dict.fromkeys([(main, main_is_whole), *named.values()]))
    if str(model) != str(main):
        named.setdefault(model, (main, main_is_whole))  # as it was given, which may be a directory of a hub's name
    for path, is_whole in bases:
        named.setdefault(short_model_name(str(path)), (path, is_whole))
    for path, is_whole in bases:
        named.setdefault(str(path), (path, is_whole))
    names_by_base = {base: tuple(name for name, named_base in named.items() if named_base == base) for base in bases}
    return tuple(BaseConfig(path=path, names=names_by_base[path, is_whole], whole=is_whole) for path, is_whole in bases)


def _find_directory(path_or_name: str, setting: str) -> Path:
    """Return the directory of the model ``path_or_name``: a path, or a name on a hub, from which it is downloaded if
    needed. ``setting`` is the option with that value, for the message of an error. Raises
    :class:`~headrace.base.errors.ConfigError` if there is no such directory."""
    from headrace.models.hub import local_directory
    from headrace.models.settings import REMEDY

    path = Path(local_directory(str(Path(path_or_name).expanduser()), setting)).resolve()
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}", remedy=REMEDY)
    return path


_WHOLE_NOTE = {False: "", True: " (all weights)"}
VERB = Verb(run=tinker, group=USE, place=35)
