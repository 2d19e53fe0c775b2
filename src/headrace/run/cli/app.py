"""The verbs together, and errors as words."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from headrace import __version__
from headrace.base.errors import HeadraceError
from headrace.run.cli import (
    bench,
    check,
    compare,
    demo,
    evaluate,
    export,
    init,
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
from headrace.run.cli.output import complain, whole_output

app = typer.Typer(
    name="headrace",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
BEGIN, USE, LOOK, PLAN = "Begin and train", "Use what was trained", "Look at a run", "Plan, compare and measure"
VERBS: dict[str, dict[str, Callable[..., None]]] = {
    BEGIN: {"init": init.init, "train": train.train, "demo": demo.demo, "recipes": recipes.recipes, "join": join.join},
    USE: {"eval": evaluate.evaluate, "export": export.export, "serve": serve.serve},
    LOOK: {
        "view": view.view, "status": status.status, "watch": watch.watch, "report": report.report,
        "ledger": ledger.ledger, "trace": trace.trace,
    },
    PLAN: {"plan": plan.plan, "compare": compare.compare, "bench": bench.bench},
}  # fmt: skip
for group, verbs in VERBS.items():
    for name, verb in verbs.items():
        app.command(name, rich_help_panel=group, help=bench.HELP if verb is bench.bench else None)(verb)
app.add_typer(check.app, name="check", rich_help_panel=BEGIN)


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
