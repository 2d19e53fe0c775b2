"""The command ``headrace serve``: read its options, load the model, and print the state of the server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.base.errors import ConfigError
from headrace.run.cli.commands import USE, Verb
from headrace.run.cli.output import console, readable, starting

if TYPE_CHECKING:
    from headrace.models import ModelConfig
    from headrace.wings.serve.config import ServeConfig
    from headrace.wings.serve.run import LoadedModel, ServerEvents

TOKEN_VARIABLE = "HEADRACE_SERVE_TOKEN"


def serve(
    model: Path = typer.Argument(
        help="Directory of a Hugging Face causal language model, or its name on a hub.", metavar="MODEL"
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than loopback needs a token."),
    port: int = typer.Option(8000, help="Port to listen on; 0 for a free one."),
    token: str = typer.Option(
        "", envvar=TOKEN_VARIABLE, help="What callers must send as 'Authorization: Bearer TOKEN'.", show_default=False
    ),
    token_file: Path | None = typer.Option(None, help="A file that holds the token."),
    device: str = typer.Option(
        "", help="Sets engine.device: cpu, cuda or cuda:N; unset: cuda where there is one.", show_default=False
    ),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="A setting of model, engine or serve (repeat)."
    ),
) -> None:
    """Serve a model over HTTP, in the protocol of OpenAI's completions and chat completions."""
    starting(f"loading what it takes to serve {model}")
    from headrace.base.clock import RealClock
    from headrace.base.config import merge, parse_override, validate
    from headrace.base.environ import apply_engine_environment
    from headrace.base.heap import gc_disabled, gc_frozen
    from headrace.run.cli.train import compile_ahead
    from headrace.wings.serve.config import ServeConfig

    apply_engine_environment()
    given: dict[str, Any] = {
        "model": {"path": str(model if _is_named(model) else model.expanduser().resolve())},
        "serve": {"host": host, "port": port},
    }
    if device:
        given["engine"] = {"device": device}
    config = validate(ServeConfig, merge(given, *(parse_override(text) for text in overrides)))
    config = config.model_copy(update={"model": _localize(config.model)})
    secret = _read_token(token, token_file)
    compile_ahead(config.model, config.engine)
    with gc_disabled():
        from headrace.wings.serve.run import load_served_model, serve

    clock = RealClock()
    with gc_frozen():
        serve(
            config.serve,
            secret,
            lambda: load_served_model(config, clock=clock),
            clock=clock,
            events=_make_events(config, with_token=bool(secret)),
        )


def _make_events(config: ServeConfig, *, with_token: bool) -> ServerEvents:
    """Return the callbacks by which the server reports its state; they print it to the console. ``config`` are the
    settings of the server. ``with_token`` is true if clients need a token."""
    from headrace.wings.serve.run import ServerEvents

    out = console()

    def listening(url: str) -> None:
        """Print the address of the server, which is loading its model."""
        out.print(f"listening on {url}; loading {readable(config.model.path)} ...")

    def serving(url: str, loaded: LoadedModel) -> None:
        """Print the facts of the served model, and a command that calls it."""
        _say_serving(url, loaded, with_token=with_token)

    def ending(num_open: int) -> None:
        """Print how many requests are still open, if there are any."""
        if num_open:
            seconds = f"{config.serve.grace_s:g} s"
            out.print(f"ending     {num_open} open requests have {seconds} to finish; Ctrl-C again cuts them")

    return ServerEvents(listening=listening, serving=serving, ending=ending)


def _read_token(option: str, file: Path | None) -> str:
    """Return the token that clients must send, from ``file`` or else from the value of the ``option``; empty for no
    token."""
    if file is None:
        return option.strip()
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {file} cannot be read: {error}", remedy="give a file that holds the token"
        ) from None
    if not secret:
        raise ConfigError(f"--token-file {file} is empty", remedy="write the token into it")
    return secret


def _is_named(model: Path) -> bool:
    """Return whether ``model`` is a name on a hub, and not a directory on this machine."""
    from headrace.models.hub import is_hub_name

    return is_hub_name(str(model)) and not model.exists()


def _localize(model: ModelConfig) -> ModelConfig:
    """Return ``model`` with ``path`` set to a local directory whose files are intact; a model named on a hub is
    downloaded first. Errors that need no torch are raised here, before torch is imported."""
    from headrace.learner.disk import verify_model
    from headrace.models.hub import local_directory

    path = local_directory(model.path)
    if not Path(path).is_dir():
        raise ConfigError(
            f"there is no directory {path}",
            remedy="give the directory of a Hugging Face causal language model: config.json, tokenizer, *.safetensors "
            "('hf download NAME --local-dir DIR' makes one), or its name on a hub: OWNER/NAME",
        )
    verify_model(Path(path))
    return model.model_copy(update={"path": path})


def _say_serving(url: str, loaded: LoadedModel, *, with_token: bool) -> None:
    """Print the facts of the model ``loaded``, its device and kernels, and a command that calls it at ``url``;
    ``with_token`` is true if the command must send a token."""
    facts, out = loaded.facts, console()
    kernels, *why = str(facts["kernels"]).split("; ")
    why = [str(facts["fallback"])] if "fallback" in facts else why
    chat = loaded.tokenizer.has_template
    route, body = (
        ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}]')
        if chat
        else ("completions", '"prompt": "Hello"')
    )
    header = f" -H 'Authorization: Bearer ${TOKEN_VARIABLE}'".replace("'", '"') if with_token else ""
    name = readable(loaded.name)
    out.print(f"serving    {', '.join([name, *loaded.agents])} at {url}/v1")
    out.print(f"context    {loaded.max_context:,} tokens")
    packed = f", and {_format_mebibytes(facts['packed_bytes'])} packed for the kernels" if facts["packed_bytes"] else ""
    out.print(f"device     {facts['device']}, weights of {_format_mebibytes(facts['weights_bytes'])}{packed}")
    out.print(f"kernels    {readable(kernels)}; attention: {facts['attention']}")
    for reason in why:
        out.print(f"           {readable(reason)}")
    out.print(f"cache      {_format_mebibytes(facts['cache_bytes'])}, {facts['cache_blocks']:,} blocks")
    out.print(f"chat       {'yes' if chat else 'no: the tokenizer has no chat template'}")
    out.print(f"token      {'needed' if with_token else 'none: only this machine may call'}")
    out.print(f"""call it    curl {url}/v1/{route} -H "Content-Type: application/json"{header} \\""")
    out.print(f"""             -d '{{"model": "{name}", {body}, "max_tokens": {min(32, loaded.max_context // 2)}}}'""")
    out.print("end it     Ctrl-C")


def _format_mebibytes(num_bytes: str | float) -> str:
    """Return a size in bytes as text in MiB."""
    return f"{float(num_bytes) / 2**20:,.0f} MiB"


VERB = Verb(run=serve, group=USE, place=30)
