"""``headrace trace``: print where a run's time went (its *verdict*), and export its event trace, made of *spans*."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.commands import LOOK, Verb
from headrace.run.cli.output import VISIBLE, console, print_json, readable, starting

if TYPE_CHECKING:
    from headrace.run.observe import RunData


def trace(
    run_dir: Path = typer.Argument(help="The run's directory; the run may still be running."),
    out: Path | None = typer.Option(
        None, help="Write the trace for ui.perfetto.dev or chrome://tracing; .json.gz to compress it."
    ),
    otlp: str = typer.Option("", help="Send the spans to an OpenTelemetry collector: http://HOST:4318/v1/traces."),
    as_json: bool = typer.Option(False, "--json", help="Print where the time went as JSON."),
) -> None:
    """Show where a run's time went, and export its event trace."""
    starting(f"reading {run_dir}")
    import msgspec

    from headrace.run.observe import load_run

    run = load_run(run_dir)
    written = _export(run, out, otlp)
    if as_json:
        account = None if run.account is None else msgspec.structs.asdict(run.account)
        print_json({"verdict": run.verdict, "account": account, "notes": run.notes, **written})
        return
    out_console = console()
    for note in run.notes:
        out_console.print(readable(note), style="yellow")
    out_console.print(readable(run.verdict) or "no verdict yet: no step has ended")
    for description, number in written.items():
        out_console.print(f"{description}: {number:,}")


def _export(run: RunData, out: Path | None, otlp: str) -> dict[str, int]:
    """Export the trace of ``run`` to the file ``out``, unless that is ``None``, and to the OpenTelemetry collector at
    the URL ``otlp``, unless that is empty. Return the number of exported events by the description of the export."""
    written: dict[str, int] = {}
    if out is not None:
        from headrace.run.observe.perfetto import write_trace

        written[f"events written to {out}"] = write_trace(run, out)
    if otlp:
        from headrace.base.config.addresses import refuse_secret
        from headrace.run.observe.otel import send_trace

        refuse_secret("--otlp", otlp, "set OTEL_EXPORTER_OTLP_HEADERS='authorization=...'", reason=VISIBLE)
        written[f"spans sent to {otlp}"] = send_trace(run, otlp)
    return written


VERB = Verb(run=trace, group=LOOK, place=60)
