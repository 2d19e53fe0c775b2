"""The command ``headrace recipes``."""

from __future__ import annotations

import msgspec
import typer

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import console, print_json


def recipes(
    name: str = typer.Argument("", help="The recipe to show with its settings; default: all recipes, one line each."),
    as_json: bool = typer.Option(False, "--json", help="Print it as JSON."),
) -> None:
    """Show what each known system does, and the settings that make a run do the same (train --like NAME)."""
    from headrace.run.session.recipes import recipe
    from headrace.run.session.recipes import recipes as known

    chosen = [recipe(name)] if name else list(known().values())
    if as_json:
        print_json([msgspec.to_builtins(each) for each in chosen])
        return
    out = console()
    if name:
        (shown,) = chosen
        out.print(f"{shown.name}: {shown.system}", style="bold")
        out.print(shown.says)
        for axis, words in shown.axes.items():
            out.print(f"  {axis.replace('_', ' '):<17}{words}")
        out.print(f"Here: {shown.differs}\n")
        out.print(shown.toml.rstrip())
        return
    width = max(len(each.name) for each in chosen)
    for each in chosen:
        out.print(f"{each.name:<{width}}  {each.says}")
    out.print("\nheadrace recipes NAME shows one; headrace train RUN_FILE --like NAME takes its settings", style="dim")


VERB = Verb(run=recipes, group=BEGIN, place=40)
