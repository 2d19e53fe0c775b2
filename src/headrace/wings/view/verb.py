"""The command ``headrace view``: read its options, and serve or export the dashboard."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.base.errors import ConfigError
from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import console, readable, starting

if TYPE_CHECKING:
    from headrace.base.clock import Clock
    from headrace.wings.view.serving import AppFactory, ViewConfig

TOKEN_VARIABLE = "HEADRACE_VIEW_TOKEN"


def view(
    directories: list[Path] = typer.Argument(
        None, help="Run directories, one that holds some, or the state of a headrace tinker; default: runs.",
        metavar="[RUN_DIR]...",
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

    Works from the run directories alone, without network. Several runs are compared. Of a headrace tinker it shows the
    tenants, their queues, and what each token was.
    """
    starting("looking for runs")
    from headrace.base.clock import RealClock
    from headrace.wings.tinker.records import is_state
    from headrace.wings.view.serving import ViewConfig

    config = ViewConfig(host=host, port=port, token=token.strip(), tls_certificate=tls_certificate, tls_key=tls_key)
    asked, clock = directories or [Path("runs")], RealClock()
    states = [each for each in asked if is_state(each)]
    if states:
        _refuse_others(asked, alone=not live and not export)
        _show_tenants(states[0].resolve(), config, clock, browser=not no_browser)
        return
    _show_runs(asked, config, clock, live=live, export=export, browser=not no_browser)


def _show_runs(
    directories: list[Path], config: ViewConfig, clock: Clock, *, live: bool, export: bool, browser: bool
) -> None:
    """Serve the dashboard of the runs in ``directories``, with the settings ``config`` and the clock ``clock``; with
    ``export``, write it into files instead. With ``live``, show only the run that wrote a file last; with ``browser``,
    open a browser."""
    from headrace.wings.view.app import make_app
    from headrace.wings.view.run import OpenRun, find_change_time, find_runs

    found = find_runs(directories)
    if live:
        found = [max(found, key=find_change_time)]
    if export:
        _export(found)
        return
    runs = [OpenRun(directory, clock) for directory in found]
    for run in runs:
        console().print(f"{readable(run.name):<28} {run.state()['state']:<10} {readable(str(run.directory))}")
    try:
        _serve(partial(make_app, runs, clock=clock), config, browser=browser)
    finally:
        for run in runs:
            run.close()


def _show_tenants(state: Path, config: ViewConfig, clock: Clock, *, browser: bool) -> None:
    """Serve the page about the server of the Tinker protocol whose state directory is ``state``."""
    from headrace.wings.tinker.records import ServerRecords
    from headrace.wings.view.tenants import make_tenants_app

    console().print(f"tenants    {readable(str(state))}")
    _serve(partial(make_tenants_app, ServerRecords(state), clock=clock), config, browser=browser)


def _refuse_others(directories: list[Path], *, alone: bool) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` unless the state directory of a server was named ``alone``,
    without other directories and without options for runs."""
    if len(directories) > 1 or not alone:
        raise ConfigError(
            "the state of a headrace tinker has a page of its own", remedy="name it alone, without --live or --export"
        )


def _serve(make_app: AppFactory, config: ViewConfig, *, browser: bool) -> None:
    """Serve the application that ``make_app`` returns with the settings ``config`` until Ctrl-C, and print its address;
    with ``browser``, open it in a browser."""
    from headrace.wings.view.serving import open_browser, serve

    out = console()
    with tempfile.TemporaryDirectory(prefix="headrace-view-") as private:

        def report(url: str) -> None:
            """Print the address of the page, and open it in a browser with ``browser``."""
            out.print(f"open     {url}", style="bold", soft_wrap=True)
            out.print("end it   Ctrl-C")
            if browser:
                open_browser(url, out.print, Path(private))

        serve(make_app, config, report=report)


def _export(run_dirs: list[Path]) -> None:
    """Write the dashboard of each run into its directory."""
    from headrace.wings.view.export import write_page

    for directory in run_dirs:
        console().print(f"written  {readable(str(write_page(directory)))}")


VERB = Verb(run=view, group=LOOK, place=10)
