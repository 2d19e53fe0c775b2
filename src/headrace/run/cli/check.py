"""``headrace check``: check a model, or user code such as a loss or an environment, before a run uses it."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import console, end_with_findings, print_json, starting

app = typer.Typer(
    help="Check a model, or a loss, an environment or a reward of your own, before a run uses it.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Check a model, or a loss, an environment or a reward of your own, before a run uses it."""


@app.command("loss")
def loss(
    reference: str = typer.Argument(help="my_losses.py:my_loss"),
    options: list[str] = typer.Option([], "--option", metavar="NAME=VALUE", help="An argument of the loss (repeat)."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Run the contract suite of losses on a loss: gradients, packing, no influence of masked tokens."""
    starting(f"checking {reference}")
    from headrace.algo.check import check_loss
    from headrace.base.config import merge, parse_override

    report = check_loss(reference, options=merge({}, *(parse_override(option) for option in options)))
    if as_json:
        print_json(report)
    else:
        console().print(str(report))
    if not report.ok:
        raise typer.Exit(1)


@app.command("env")
def env(
    reference: str = typer.Argument(
        help="my_env.py:MyEnv, my_env.py:rollout, my_reward.py:reward, LIBRARY/WHAT of a bridge, shell, or a command."
    ),
    data: Path = typer.Option(
        None, "--data", help="Rows to try (.jsonl, .csv, .parquet, task directories).", show_default=False
    ),
    num_rows: int = typer.Option(3, "--rows", min=1, help="Number of rows to try."),
    option: list[str] = typer.Option(
        [], "--option", metavar="NAME=VALUE", help="An entry of env.options, for a bridge or shell (repeat)."
    ),
    timeout_s: float = typer.Option(20.0, "--timeout", help="Longest time of an episode, in seconds."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Run an environment, a rollout, a program, a bridge or a reward against scripted models, and report its
    problems."""
    starting(f"checking {reference}: loading what that needs takes some seconds")
    from headrace.base.config import merge, parse_override
    from headrace.rollout.environments.data import load_rows
    from headrace.run.session.checking import check_env

    rows = load_rows(data)[:num_rows] if data is not None else []
    options = merge({}, *(parse_override(text) for text in option))
    report = check_env(reference, rows=rows, timeout_s=timeout_s, options=options, on_progress=starting)
    end_with_findings(report, ok=report.ok, as_json=as_json)


@app.command("model")
def model(
    path: str = typer.Argument(help="The directory of a model, or its name on the hub.", metavar="DIR"),
    dtype: str = typer.Option("float32", help="Number format of the weights: float32 or bfloat16."),
    lora: bool = typer.Option(False, "--lora", help="Train an adapter instead of the weights."),
    tokens: int = typer.Option(2048, "--tokens", min=8, help="Longest sequence that is compared, in tokens."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Compare a model with transformers: alone, packed, long, sampled, trained, published and exported."""
    starting(f"checking {path}: the model is loaded four times")
    from importlib import import_module

    from headrace.models.hub import local_directory
    from headrace.models.settings import model_directory

    directory = local_directory(path)
    model_directory(directory)  # a wrong path is refused before torch is imported
    checking = import_module("headrace.policy.model_check")  # imported by name, since imports may only point down
    report = checking.check_model(directory, dtype=dtype, lora=lora, longest=tokens)
    end_with_findings(report, ok=report.ok, as_json=as_json)


VERB = Verb(run=app, group=BEGIN, place=60)
