"""``headrace eval``."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.cli.output import console, print_json, readable
from headrace.cli.train import SET_HELP


def evaluate(
    where: Path = typer.Argument(help="A run file (TOML): its model; or a run directory: its newest checkpoint."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Measure the mean reward on the held-out rows, without training."""
    from headrace.session import evaluate as measure
    from headrace.session.directory import run_file_of

    result = measure(run_file_of(where), overrides=overrides)
    if as_json:
        print_json(result)
        return
    out = console()
    for warning in result.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    out.print(
        f"mean reward {result.mean_reward:.4f} over {result.tasks} tasks × {result.samples}, temperature "
        f"{result.temperature:g}, {result.tokens:,} tokens, model {readable(result.model)}"
    )
