"""``headrace bench``."""

from __future__ import annotations

import typer

from headrace.cli.output import console, print_json


def bench(
    name: str = typer.Argument(help="Which benchmark: loop or algo."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Measure this machine, and hold the figures against their targets."""
    from headrace.bench import run_benchmark, show

    out = console()
    result = run_benchmark(name, tell=lambda line: None if as_json else out.print(line, style="dim"))
    if as_json:
        print_json(result)
    else:
        out.print(show(result))
    if not all(target.holds for target in result.targets):
        raise typer.Exit(1)
