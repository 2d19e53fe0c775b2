"""``headrace export``: write trained weights as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from headrace.run.cli.commands import USE, Verb
from headrace.run.cli.output import console, print_json, readable, starting


def export(
    source: Path = typer.Argument(
        metavar="WHERE", help="A run's directory, for its newest checkpoint; or a checkpoint; or a saved policy."
    ),
    out: Path = typer.Argument(help="Directory to write, which must be new.", metavar="OUT_DIR"),
    adapter: Literal["merged", "separate"] | None = typer.Option(
        None,
        help="merged (the default): the adapter merged into its base; separate: the adapter's files, as peft has them.",
    ),
    dtype: Literal["float32", "bfloat16"] | None = typer.Option(
        None, help="Number format of a merged model; float32 loses nothing."
    ),
    agent: str = typer.Option(
        "",
        help="The agent whose adapter is exported, if agents have trained their own; policy: the policy's.",
        show_default=False,
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Write trained weights as plain Hugging Face files, which transformers (or peft) loads."""
    starting(f"exporting {source}")
    from headrace.base.heap import gc_disabled

    with gc_disabled():
        from headrace.run.session.exporting import export as write

    exported = write(source, out, adapter, dtype, agent)
    if as_json:
        print_json(exported)
        return
    out_console = console()
    of_agent = f" of agent {exported.agent}" if exported.agent else ""
    out_console.print(
        f"{exported.kind}{of_agent} of {readable(exported.source)} written to {readable(exported.directory)}"
    )
    if exported.lost_share:
        out_console.print(
            f"warning: {exported.lost_share:.0%} of the weights that the adapter changes are the base's again in "
            f"{dtype}: export it --adapter separate, or as float32",
            style="yellow",
        )


VERB = Verb(run=export, group=USE, place=20)
