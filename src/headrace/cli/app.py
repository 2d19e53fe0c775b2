"""The verbs together, and errors as words."""

from __future__ import annotations

import sys

import typer

from headrace import __version__
from headrace.cli import (
    bench,
    check,
    compare,
    demo,
    evaluate,
    export,
    join,
    ledger,
    plan,
    recipes,
    report,
    serve,
    status,
    trace,
    train,
    view,
    watch,
)
from headrace.cli.output import complain, whole_output
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train")(train.train)
app.command("demo")(demo.demo)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("serve")(serve.serve)
app.command("view")(view.view)
app.command("report")(report.report)
app.command("join")(join.join)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.command("trace")(trace.trace)
app.command("ledger")(ledger.ledger)
app.command("plan")(plan.plan)
app.command("recipes")(recipes.recipes)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.add_typer(check.app, name="check")


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    """Asynchronous reinforcement learning for language models."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the program; an error that the user can mend is told in words, and the exit code is 1."""
    with whole_output():
        try:
            app()
        except HeadraceError as error:
            complain(error)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
