"""``headrace check``: check user code, a loss or an environment, before a run uses it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import console, print_json, readable, starting

app = typer.Typer(
    help="Check a loss, an environment or a reward of your own before a run uses it.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Check a loss, an environment or a reward of your own before a run uses it."""


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
        help="my_env.py:MyEnv, my_env.py:rollout, my_reward.py:reward, LIBRARY/WHAT of a bridge, or a command."
    ),
    data: Path = typer.Option(None, "--data", help="Rows to try (.jsonl, .csv, .parquet).", show_default=False),
    num_rows: int = typer.Option(3, "--rows", min=1, help="Number of rows to try."),
    option: list[str] = typer.Option(
        [], "--option", metavar="NAME=VALUE", help="An entry of env.options, for a bridge (repeat)."
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
    report = check_env(reference, rows=rows, timeout_s=timeout_s, options=options, tell=starting)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        console().print(readable(str(report)))
    if not report.ok:
        raise typer.Exit(1)


VERB = Verb(run=app, group=BEGIN, place=60)
