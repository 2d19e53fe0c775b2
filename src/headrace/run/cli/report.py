"""``headrace report``."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.run.cli.output import console, readable, starting


def report(
    run_dir: Path = typer.Argument(help="The run's directory.", metavar="RUN"),
    png: bool = typer.Option(False, "--png", help="The whole report as one picture too: report/report.png."),
) -> None:
    """Write the report of a run, ended or not: one HTML file with its pictures inside, and each picture as a PNG."""
    starting(f"reading {run_dir}")
    from headrace.run.observe.report import write_report

    out = console()
    page = write_report(run_dir)
    out.print(f"report   {readable(str(page))}")
    if png:
        from headrace.run.observe.poster import write_poster

        out.print(f"picture  {readable(str(write_poster(run_dir)))}")
