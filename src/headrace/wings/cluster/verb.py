"""The command ``headrace join``: offer this machine's processors to a run."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import console, readable, starting


def join(
    invitation: Path = typer.Argument(help="join.json of the run's directory, or a copy of it; or that directory."),
    workers: int = typer.Option(1, min=1, help="The most worker processes on this machine."),
    entry: str = typer.Option(
        "",
        help="Where this machine has the environment (FILE.py:NAME), or its command; unset: where the run says.",
        show_default=False,
    ),
    wait: float = typer.Option(0.0, min=0.0, help="Seconds to wait for a run that admits this machine."),
) -> None:
    """Offer this machine to a run with launch.join: its environments run here too, until it ends or Ctrl-C.

    The run's orders are carried out as your user, so join only runs of people whom you trust.
    """
    starting(f"reading {invitation}")
    from headrace.wings.cluster.joining.node import Offer, join

    out = console()
    offer = Offer(workers=workers, entry=entry, wait_s=wait)
    join(invitation, offer, lambda text: out.print(readable(text)))


VERB = Verb(run=join, group=BEGIN, place=50)
