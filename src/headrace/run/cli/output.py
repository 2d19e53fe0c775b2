"""What the verbs print."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.base.errors import HeadraceError, visible
from headrace.base.lasting import to_nowhere

VISIBLE = "every user of this machine can read the arguments of its programs"


def console(*, stderr: bool = False) -> Console:
    """The terminal; nothing that is printed is read as markup unless it says so."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def starting(doing: str) -> None:
    """Say on standard error what a verb begins with, before the imports that take it seconds."""
    try:
        console(stderr=True).print(f"{readable(doing)} ...", style="dim")
    except OSError:  # a full disk, or a terminal that is gone: the verb goes on without its words
        to_nowhere(sys.stderr)


def complain(error: HeadraceError) -> None:
    """Problem and remedy, on standard error."""
    err = console(stderr=True)
    with suppress(OSError):  # its terminal may be gone
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


HUNG_UP = 128 + signal.SIGHUP
"""The exit code of a run that ended in order because its terminal was closed."""


def leave_if_hung_up(stopped_by: str) -> None:
    """Leave with :data:`HUNG_UP` where SIGHUP has stopped the run: whoever waits for it can tell, and resume."""
    if stopped_by == "SIGHUP":
        raise typer.Exit(HUNG_UP)


@contextmanager
def whole_output() -> Iterator[None]:
    """Leave with the exit code 1 where standard output takes no more, and say so in one line on standard error; of a
    pipe whose reader has left (``| head -1``) nothing is said, as other programs do."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or not _takes_no_more(sys.stdout):
            raise
        to_nowhere(sys.stdout)
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                sys.stderr.write(f"error: standard output cannot be written: {error.strerror}\n")
        sys.exit(1)


def _takes_no_more(stream: TextIO) -> bool:
    """Whether the file behind ``stream`` refuses a byte more."""
    try:
        os.write(stream.fileno(), b"\n")
    except (OSError, ValueError):
        return True
    return False


def print_json(value: Any) -> None:
    """``value`` (a record or a tree) as JSON on standard output, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(title: str, *columns: str) -> Table:
    """A plain table; the first column is text, the others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made
