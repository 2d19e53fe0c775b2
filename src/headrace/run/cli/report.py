"""``headrace report``: write the report of a run."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, readable, starting


def report(run_dir: Path = typer.Argument(help="The run's directory.", metavar="RUN")) -> None:
    """Write the report of a run, ended or not: its dashboard as one HTML file, with the latest episodes in it."""
    starting(f"reading {run_dir}")
    from headrace.run.observe.report import write_report

    out = console()
    page = write_report(run_dir)
    out.print(f"report   {readable(str(page))}")


VERB = Verb(run=report, group=LOOK, place=40)
