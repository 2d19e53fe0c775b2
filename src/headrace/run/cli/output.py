"""The output of the verbs: console, errors, JSON and tables."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.base.errors import HeadraceError, NothingBegun, visible
from headrace.base.lasting import redirect_to_null

VISIBLE = "every user of this machine can read the arguments of its programs"
"""The reason why a secret may not stand among the arguments of a program."""


def console(*, stderr: bool = False) -> Console:
    """Return a console on standard output, or standard error, that reads no markup in the text it prints."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def starting(doing: str) -> None:
    """Print on standard error what a verb starts to do: before imports that take seconds, and at each stage."""
    try:
        console(stderr=True).print(f"{readable(doing)} ...", style="dim")
    except OSError:  # a full disk, or a terminal that is gone: the verb continues without this output
        redirect_to_null(sys.stderr)


def complain(error: HeadraceError) -> None:
    """Print the problem and the remedy of an error on standard error."""
    err = console(stderr=True)
    with suppress(OSError):  # its terminal may be gone
        err.print("error: ", style="bold red", end="")
        err.print(readable(error.problem))
        err.print("remedy: ", style="bold green", end="")
        err.print(readable(error.remedy))


def readable(text: str) -> str:
    """Return ``text`` with every control character except line breaks spelled out, so that it cannot steer a
    terminal."""
    return "\n".join(visible(line) for line in text.split("\n"))


def end_with_findings(report: object, *, ok: bool, as_json: bool) -> None:
    """Print a report as text or as JSON, and exit with code 1 unless it is ``ok``."""
    if as_json:
        print_json({"ok": ok, **msgspec.to_builtins(report)})
    else:
        console().print(readable(str(report)))
    if not ok:
        raise typer.Exit(1)


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """Print the ``command`` that continues a run, if there is one, and exit with code 130, where the run in this
    context is ended at once: by a second Ctrl-C, or by a signal while it starts."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        lines = [str(stopped) or "stopped"]
        if isinstance(stopped, NothingBegun):
            lines.append("nothing was begun: the same command starts it again")
        elif command:
            lines.append(continued_by(command))
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        raise typer.Exit(130) from None


def continued_by(command: str) -> str:
    """Return the line that says with which command a stopped run continues."""
    return f"continue {readable(command)}"


def command_line(*words: str) -> str:
    """Return the command line, as a shell reads it, that calls this program with ``words``: as the user has called it,
    unless a shell finds it by its name alone."""
    program = [sys.argv[0]]
    if Path(program[0]).name == "__main__.py":
        program = [sys.executable, "-m", "headrace"]
    elif Path(program[0]).name != "headrace" or shutil.which("headrace") == program[0]:
        program = ["headrace"]
    return shlex.join([*program, *words])


def this_command(*more: str) -> str:
    """Return the command line of this process with the words ``more`` at its end."""
    return command_line(*(word for word in sys.argv[1:] if word != "--resume"), *more)


def resuming(run_dir: str, *, prefix: str = "") -> tuple[str, str]:
    """Return the directory of a run whose settings say ``run_dir``, and the command that continues it there.

    Where they say nothing, a new directory is chosen, whose name begins with ``prefix``, and the command names it.
    """
    from headrace.base.clock import RealClock
    from headrace.run.session.directory import choose_directory

    directory = str(choose_directory(run_dir, RealClock(), prefix=prefix))
    return directory, this_command(*(() if run_dir else ("--set", f"run.dir={directory}")), "--resume")


HUNG_UP = 128 + signal.SIGHUP
"""The exit code of a run that ended in order because its terminal was closed."""


def leave_if_hung_up(stopped_by: str) -> None:
    """Exit with :data:`HUNG_UP` where SIGHUP stopped the run, so that a calling script can tell and resume it."""
    if stopped_by == "SIGHUP":
        raise typer.Exit(HUNG_UP)


@contextmanager
def whole_output() -> Iterator[None]:
    """Exit with code 1 and one line on standard error where standard output cannot be written.

    Nothing is printed where standard output is a pipe whose reader has gone (``| head -1``), as other programs do.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or not _refuses_writes(sys.stdout):
            raise
        redirect_to_null(sys.stdout)
        if error.errno != errno.EPIPE:
            with suppress(OSError):
                sys.stderr.write(f"error: standard output cannot be written: {error.strerror}\n")
        sys.exit(1)


def _refuses_writes(stream: TextIO) -> bool:
    """Return whether a write to the file behind ``stream`` fails."""
    try:
        os.write(stream.fileno(), b"\n")
    except (OSError, ValueError):
        return True
    return False


def print_json(value: Any) -> None:
    """Print ``value`` (a record or a tree) as JSON on standard output, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(title: str, *columns: str) -> Table:
    """Return a plain table. The first column is aligned as text, the others as numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made
