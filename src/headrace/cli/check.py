"""``headrace check``."""

from __future__ import annotations

import typer

from headrace.cli.output import console, print_json

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
    from headrace.algo.check import check_loss
    from headrace.config import merge, parse_override

    report = check_loss(reference, options=merge({}, *(parse_override(option) for option in options)))
    if as_json:
        print_json(report)
    else:
        console().print(str(report))
    if not report.ok:
        raise typer.Exit(1)
