"""``headrace bench``."""

from __future__ import annotations

import typer

from headrace.cli.output import console, print_json


def bench(
    name: str = typer.Argument(help="Which benchmark: loop."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure this machine, and hold the figures against their targets."""
    from headrace.bench import run_benchmark, show

    result = run_benchmark(name)
    if as_json:
        print_json(result)
    else:
        console().print(show(result))
