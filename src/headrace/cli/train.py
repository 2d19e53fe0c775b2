"""``headrace train``."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.cli.output import console, print_json, resumable

SET_HELP = "Override a setting: --set learner.lr=1e-6 (repeat for more)."


def train(
    run_file: Path = typer.Argument(help="The run file (TOML)."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in run.dir."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, print the settings, start nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary (or the settings) as JSON."),
) -> None:
    """Train a model as the run file says."""
    from headrace.session import load_config

    config = load_config(run_file, overrides)
    if dry_run:
        from headrace.session.explain import explain
        from headrace.session.prepare import Inputs, prepare

        prepared = prepare(config, Inputs())
        if as_json:
            print_json(config.model_dump(mode="json"))
        else:
            console().print(explain(prepared))
        return
    from headrace.cli.ending import show_summary
    from headrace.session import train as run

    if as_json:
        config = load_config(config, ["observe.view=none"])
    with resumable():
        summary = run(config, resume=resume)
    if as_json:
        print_json(summary)
    else:
        show_summary(summary)
