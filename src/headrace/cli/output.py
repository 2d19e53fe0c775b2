"""What the verbs print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError, visible

VISIBLE = "every user of this machine can read the arguments of its programs"


def console(*, stderr: bool = False) -> Console:
    """The terminal; nothing that is printed is read as markup unless it says so."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def starting(doing: str) -> None:
    """Say on standard error what a verb begins with, before the imports that take it seconds."""
    console(stderr=True).print(f"{readable(doing)} ...", style="dim")


def complain(error: HeadraceError) -> None:
    """Problem and remedy, on standard error."""
    err = console(stderr=True)
    err.print("error: ", style="bold red", end="")
    err.print(readable(error.problem))
    err.print("remedy: ", style="bold green", end="")
    err.print(readable(error.remedy))


def readable(text: str) -> str:
    """``text`` with every character that could steer a terminal spelled out; its lines stay lines."""
    return "\n".join(visible(line) for line in text.split("\n"))


@contextmanager
def resumable() -> Iterator[None]:
    """A run that is ended at once, by a second Ctrl-C, says so and leaves with the exit code 130."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        sys.stderr.write(f"{stopped or 'stopped'}\n")
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    """``value`` (a record or a tree) as JSON on standard output, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(title: str, *columns: str) -> Table:
    """A plain table; the first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made
