"""The command ``headrace view``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, readable, starting

TOKEN_VARIABLE = "HEADRACE_VIEW_TOKEN"


def view(
    directories: list[Path] = typer.Argument(
        None, help="Run directories, or one that holds some; default: runs.", metavar="[RUN_DIR]...",
        show_default=False,
    ),
    live: bool = typer.Option(False, "--live", help="Only the run that wrote last: the one that is running."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8321, help="Port to listen on; 0 for a free one."),
    token: str = typer.Option(
        "", envvar=TOKEN_VARIABLE, show_default=False,
        help="The token that a browser must send; default: a new one, which is printed.",
    ),
    tls_certificate: str = typer.Option("", help="PEM file with the server's certificate: https.", show_default=False),
    tls_key: str = typer.Option("", help="PEM file with the key of the certificate.", show_default=False),
    export: bool = typer.Option(
        False, "--export", help="Write each run's dashboard as one file, report/report.html in its directory, and end."
    ),
    no_browser: bool = typer.Option(False, "--no-browser", help="Print the address and open nothing."),
) -> None:  # fmt: skip
    """Show runs in a browser, while they run or afterwards: verdict, timeline, flow, every token of every episode.

    Works from the run directories alone, without network. Several runs are compared.
    """
    starting("looking for runs")
    from headrace.base.clock import RealClock
    from headrace.wings.view.run import OpenRun, changed_s, find_runs
    from headrace.wings.view.serving import ViewConfig, open_browser, serve

    out, clock = console(), RealClock()
    config = ViewConfig(host=host, port=port, token=token.strip(), tls_certificate=tls_certificate, tls_key=tls_key)
    found = find_runs(directories or [Path("runs")])
    if live:
        found = [max(found, key=changed_s)]
    if export:
        _export(found)
        return
    runs = [OpenRun(directory, clock) for directory in found]
    for run in runs:
        out.print(f"{readable(run.name):<28} {run.state()['state']:<10} {readable(str(run.directory))}")

    def report(url: str) -> None:
        out.print(f"open     {url}", style="bold", soft_wrap=True)
        out.print("end it   Ctrl-C")
        if not no_browser:
            open_browser(url, out.print, Path(private))

    try:
        with tempfile.TemporaryDirectory(prefix="headrace-view-") as private:
            serve(runs, config, clock=clock, report=report)
    finally:
        for run in runs:
            run.close()


def _export(found: list[Path]) -> None:
    """Write the dashboard of each run into its directory."""
    from headrace.wings.view.export import write_page

    for directory in found:
        console().print(f"written  {readable(str(write_page(directory)))}")


VERB = Verb(run=view, group=LOOK, place=10)
