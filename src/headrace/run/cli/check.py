"""``headrace check``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from headrace.run.cli.output import console, print_json, readable, starting

app = typer.Typer(help="Check parts of your own before a run uses them.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Check parts of your own before a run uses them."""


@app.command("loss")
def loss(
    reference: str = typer.Argument(help="my_losses.py:my_loss"),
    options: list[str] = typer.Option([], "--option", metavar="NAME=VALUE", help="An argument of the loss (repeat)."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Run a loss through the contract suite: gradient, packing, masked tokens without influence."""
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
        help="my_env.py:MyEnv, my_env.py:rollout, my_reward.py:reward, LIBRARY/WHAT of a bridge, or a command."
    ),
    data: Path = typer.Option(None, "--data", help="Rows to try it on (.jsonl, .csv, .parquet).", show_default=False),
    num_rows: int = typer.Option(3, "--rows", min=1, help="How many of them."),
    option: list[str] = typer.Option(
        [], "--option", metavar="NAME=VALUE", help="One of env.options, of a bridge; may be repeated."
    ),
    timeout_s: float = typer.Option(20.0, "--timeout", help="Seconds that an episode may take."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Run an environment, a rollout, a program, a bridge or a reward against scripted models, and say what is wrong."""
    starting(f"checking {reference}")
    from headrace.base.config import merge, parse_override
    from headrace.rollout.environments.data import load_rows
    from headrace.run.session.checking import check_env

    rows = load_rows(data)[:num_rows] if data is not None else []
    options = merge({}, *(parse_override(text) for text in option))
    report = check_env(reference, rows=rows, timeout_s=timeout_s, options=options)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        console().print(readable(str(report)))
    if not report.ok:
        raise typer.Exit(1)
