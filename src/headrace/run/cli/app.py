"""The program ``headrace`` as a whole: its verbs (commands such as ``headrace train``), and the printing of errors."""

from __future__ import annotations

import sys

import typer

from headrace import __version__
from headrace.base.errors import HeadraceError
from headrace.run.cli.commands import VerbGroup
from headrace.run.cli.output import complain, exit_if_output_fails

app = typer.Typer(
    cls=VerbGroup,
    name="headrace",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Asynchronous reinforcement learning for language models."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the program ``headrace`` with the arguments of this process. An error of Headrace's own classes is printed
    with its remedy, and the exit code is then 1; after Ctrl-C it is 130."""
    with exit_if_output_fails():
        try:
            app(prog_name="headrace")
        except HeadraceError as error:
            complain(error)
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
