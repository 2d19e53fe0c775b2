"""Functions with which the verbs print their output: console, errors, JSON, tables, and the command that continues a
run. A *verb* is a command of the program, such as ``headrace train``; ``headrace.run.cli`` has one file for each."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.base.errors import HeadraceError, StoppedAtStart, visible
from headrace.base.lasting import redirect_to_null

VISIBLE = "every user of this machine can read the arguments of its programs"
"""The reason, for messages, why a secret may not be a command-line argument."""


def console(*, stderr: bool = False) -> Console:
    """Return a ``rich`` console on standard output, or with ``stderr`` on standard error. The console prints text
    unchanged, without markup or emoji codes, and does not wrap long lines."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def starting(activity: str) -> None:
    """Print ``activity``, such as ``reading run.toml``, on standard error, to tell the user what a verb does now:
    before imports that take seconds, and at each stage. The verb continues if this cannot be printed."""
    try:
        console(stderr=True).print(f"{readable(activity)} ...", style="dim")
    except OSError:  # a full disk, or a terminal that is gone: the verb continues without this output
        redirect_to_null(sys.stderr)


def complain(error: HeadraceError) -> None:
    """Print the problem and the remedy of ``error`` on standard error, for the user; do nothing if standard error
    cannot be written."""
    err = console(stderr=True)
    with suppress(OSError):  # the terminal may be closed
        err.print("error: ", style="bold red", end="")
        err.print(readable(error.problem))
        err.print("remedy: ", style="bold green", end="")
        err.print(readable(error.remedy))


def readable(text: str) -> str:
    """Return ``text`` with every control character except line breaks replaced by a visible escape sequence, so that
    the text cannot control a terminal."""
    return "\n".join(visible(line) for line in text.split("\n"))


def end_with_findings(report: object, *, ok: bool, as_json: bool) -> None:
    """Print ``report``, the result of a check, as text or with ``as_json`` as JSON. Exit with code 1 if ``ok`` is
    false, which means that the check has failed."""
    if as_json:
        print_json({"ok": ok, **msgspec.to_builtins(report)})
    else:
        console().print(readable(str(report)))
    if not ok:
        raise typer.Exit(1)


HUNG_UP = 128 + signal.SIGHUP
"""The exit code of a run that ended because its terminal was closed."""


@contextmanager
def resumable(command: str, can_continue: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Run the body of the context, which starts a run, and handle an immediate end of this run: a second Ctrl-C, or a
    signal during its start. Then print ``command``, the command line that continues the run, and exit with code 130
    (:data:`HUNG_UP` for SIGHUP). ``can_continue``, called at that moment, returns whether there is a run to
    continue."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        nothing_to_continue = "there is nothing to continue: the same command starts anew"
        lines = [str(stopped) or "stopped", format_continuation(command) if can_continue() else nothing_to_continue]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        hung_up = isinstance(stopped, StoppedAtStart) and stopped.signal_name == "SIGHUP"
        raise typer.Exit(HUNG_UP if hung_up else 130) from None


def format_continuation(command: str) -> str:
    """Return a line for the user that contains ``command``, the command line that continues a stopped run."""
    return f"continue {readable(command)}"


def command_line(*words: str) -> str:
    """Return the command line, quoted for a shell, that calls this program with the arguments ``words``. The command
    line begins with ``headrace`` if a shell finds the program by that name, and otherwise with the path by which the
    user has called the program."""
    program = [sys.argv[0]]
    if Path(program[0]).name == "__main__.py":
        program = [sys.executable, "-m", "headrace"]
    elif Path(program[0]).name != "headrace" or shutil.which("headrace") == program[0]:
        program = ["headrace"]
    return shlex.join([*program, *words])


def this_command(*more: str) -> str:
    """Return the command line of this process, quoted for a shell, without ``--resume`` and with the arguments ``more``
    appended."""
    return command_line(*(word for word in sys.argv[1:] if word != "--resume"), *more)


def plan_resumption(run_dir: str, *, prefix: str = "") -> tuple[str, str]:
    """Return the directory of the run that this command starts, and the command line that continues the run there.

    ``run_dir`` is the setting ``run.dir``. If it is empty, a new directory is chosen, whose name begins with
    ``prefix``, and the command line names it.
    """
    from headrace.base.clock import RealClock
    from headrace.run.session.directory import choose_directory

    directory = str(choose_directory(run_dir, RealClock(), prefix=prefix))
    return directory, this_command(*(() if run_dir else ("--set", f"run.dir={directory}")), "--resume")


def exit_if_hung_up(stopped_by: str) -> None:
    """Exit with the code :data:`HUNG_UP` if the run was stopped by SIGHUP, from which a calling script learns that it
    can resume the run. ``stopped_by`` is the name of the signal that stopped the run; empty if no signal did."""
    if stopped_by == "SIGHUP":
        raise typer.Exit(HUNG_UP)


@contextmanager
def exit_if_output_fails() -> Iterator[None]:
    """Run the body of the context, the whole program. Exit with code 1 and one line on standard error if standard
    output cannot be written.

    The line is omitted, as in other programs, if standard output is a pipe that its reader has closed (``| head -1``).
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
    """Return whether a write to the file behind ``stream`` fails. The function writes an empty line to find out."""
    try:
        os.write(stream.fileno(), b"\n")
    except (OSError, ValueError):
        return True
    return False


def print_json(value: Any) -> None:
    """Print ``value`` (a record or a tree) as JSON on standard output, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(title: str, *columns: str) -> Table:
    """Return an empty table without borders, with ``title`` above it, to which the caller adds rows. ``columns`` are
    the headings; the first column is aligned to the left, for text, and the others to the right, for numbers."""
    new_table = Table(
        title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for index, column in enumerate(columns):
        new_table.add_column(column, justify="left" if index == 0 else "right")
    return new_table
