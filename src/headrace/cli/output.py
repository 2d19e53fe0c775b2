"""What the verbs print."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.errors import HeadraceError


def console() -> Console:
    """The terminal; nothing that is printed is read as markup unless it says so."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def complain(error: HeadraceError) -> None:
    """Problem and remedy, on standard error."""
    err = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    err.print("error: ", style="bold red", end="")
    err.print(error.problem)
    err.print("remedy: ", style="bold green", end="")
    err.print(error.remedy)


def print_json(value: Any) -> None:
    """``value`` (a record or a tree) as JSON on standard output, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(title: str, *columns: str) -> Table:
    """A plain table; the first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made
