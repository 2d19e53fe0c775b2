"""The command ``headrace doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import typer

from headrace.base.errors import ConfigError
from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import end_with_findings, starting

TOKEN_VARIABLE = "HEADRACE_DOCTOR_TOKEN"


def doctor(
    target: str = typer.Argument("", help="A server's URL, or a model's directory.", metavar="[URL | MODEL_DIR]"),
    model: str = typer.Option("", help="With a URL: the directory of the model that it should serve."),
    adapter: Path | None = typer.Option(None, help="The directory of the adapter that it should have applied."),
    also: list[Path] = typer.Option([], "--also", help="A directory that the server may hold instead (repeat)."),
    dtype: str = typer.Option(
        "auto", help="The precision that it should compute in: float32, bfloat16, or auto, that of the files."
    ),
    served: str = typer.Option("", help="The name of the model in requests; unset: the first that is served."),
    token: str = typer.Option("", envvar=TOKEN_VARIABLE, help="The server's token.", show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Find out what is wrong with this machine, a model's directory, or the weights that a server samples from."""
    is_url = target.startswith(("http://", "https://"))
    if is_url and not model:
        raise ConfigError(f"{target} is compared with nothing", remedy="name what it should serve: --model DIR")
    if not is_url and (model or adapter or also or served):
        raise ConfigError("--model, --adapter, --also and --served are for a server", remedy="give its URL first")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"--dtype {dtype} is unknown", remedy="choose auto, float32 or bfloat16")
    starting(f"examining {target or 'this machine'}")
    if is_url:
        from headrace.models.hub import local_directory
        from headrace.wings.doctor.candidates import make_expectation
        from headrace.wings.doctor.diagnosis import examine_server
        from headrace.wings.doctor.server import ServerProbe

        precision = cast("Literal['auto', 'float32', 'bfloat16']", dtype)
        expected = make_expectation(Path(local_directory(model, "--model")), adapter, precision, also)
        with ServerProbe(target, token=token, model=served) as probe:
            report = examine_server(probe, expected)
    elif target:
        from headrace.models.hub import local_directory
        from headrace.wings.doctor.directory import examine_directory

        report = examine_directory(Path(local_directory(target, "MODEL_DIR")))
    else:
        from headrace.base.clock import RealClock
        from headrace.wings.doctor.machine import examine_machine

        report = examine_machine(RealClock())
    end_with_findings(report, ok=report.ok, as_json=as_json)


VERB = Verb(run=doctor, group=BEGIN, place=70)
