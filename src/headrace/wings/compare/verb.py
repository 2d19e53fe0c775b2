"""The command ``headrace compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.commands import PLAN, Verb
from headrace.run.cli.output import (
    console,
    format_continuation,
    print_json,
    readable,
    resumable,
    starting,
    table,
    this_command,
)
from headrace.run.cli.train import SET_HELP

if TYPE_CHECKING:
    from headrace.wings.compare.running import RecipeComparison


WIDTH = 156
"""Smallest width of the table in characters. A narrower terminal wraps its lines, so that no figure is cut off."""


def compare(
    recipes: list[str] = typer.Argument(
        None, help="Recipes to compare (see headrace recipes); default: all.", metavar="[RECIPE]...", show_default=False
    ),
    run_file: Path = typer.Option(
        None, "--run", metavar="RUN_FILE", help="Model, task and sizes; default: the demo.", show_default=False
    ),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    steps: int = typer.Option(
        None, "--steps", min=1, help="Steps of each run; default: the run file's, or 100.", show_default=False
    ),
    seed: int = typer.Option(
        None, "--seed", min=0, help="Seed of all runs; default: the run file's, or 0.", show_default=False
    ),
    directory: Path = typer.Option(
        None, "--dir", help="Directory of the runs; finished ones are not repeated. Default: a new one in runs/."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:  # fmt: skip
    """Run recipes on the same model, task, seed and steps, one after another, and compare what they came to.

    Each has a run directory of its own under --dir. The same command continues where it was interrupted.
    """
    starting("loading what a comparison needs")
    from headrace.base.clock import RealClock
    from headrace.run.session.directory import choose_directory
    from headrace.run.session.recipes import recipes as known
    from headrace.wings.compare.running import ComparisonConfig
    from headrace.wings.compare.running import compare as run
    from headrace.wings.compare.writing import make_comparison_report, write

    target = directory.resolve() if directory else choose_directory("", RealClock(), prefix="compare-")
    names = recipes or list(known())
    config = ComparisonConfig(
        recipes=names, directory=target, run_file=run_file, steps=steps, seed=seed, overrides=tuple(overrides)
    )  # fmt: skip
    progress = console(stderr=as_json)
    progress.print(f"One after another, in {readable(str(target))}: {', '.join(map(readable, names))}", style="bold")
    again = this_command() if directory else this_command("--dir", str(target))
    with resumable(again):
        comparison = run(config, lambda words: progress.print(readable(words)), write)
    if as_json:
        print_json(make_comparison_report(comparison))
    else:
        _print_comparison(comparison, again)
    if comparison.stopped or any(row.status == "failed" for row in comparison.rows):
        raise typer.Exit(130 if comparison.stopped else 1)


def _print_comparison(comparison: RecipeComparison, again: str) -> None:
    """Print the table of ``comparison``, the recipes that have failed, and the paths of its files. If the comparison
    was stopped, print also the command ``again``, which continues it."""
    from headrace.wings.compare.tables import COLUMNS, describe_failures, make_cells

    out = console()
    shown = table(f"\nOn {comparison.base}", *(name.replace(" ", "\n", 1) for name in COLUMNS))
    for line in make_cells(comparison.rows):
        shown.add_row(*line)
    out.width = max(WIDTH, out.width)
    out.print(shown)
    for words in describe_failures(comparison.rows):
        out.print(readable(words), style="yellow")
    if comparison.stopped:
        out.print(format_continuation(again), style="bold")
    out.print(f"written  {readable(str(comparison.directory))}/compare.md, compare.json, compare.svg")
    out.print(f"closer   headrace view {readable(str(comparison.directory))}")


VERB = Verb(run=compare, group=PLAN, place=20)
