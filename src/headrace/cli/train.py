"""``headrace train``."""

from __future__ import annotations

from pathlib import Path

import typer

from headrace.cli.output import console, print_json, resumable

LIKE_HELP = "Take what the run file leaves open from a recipe: --like areal (see: headrace recipes)."
SET_HELP = "Override a setting: --set learner.lr=1e-6 (repeat for more)."


def train(
    run_file: Path = typer.Argument(None, help="The run file (TOML); with --replay, the recorded run's by default."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    like: str = typer.Option("", "--like", metavar="RECIPE", help=LIKE_HELP),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in run.dir."),
    replay: Path = typer.Option(None, "--replay", help="Repeat the run in this directory, bit for bit, in another."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, print the settings, start nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary (or the settings) as JSON."),
) -> None:
    """Train a model as the run file says."""
    if run_file is None and replay is None:
        raise typer.BadParameter("Missing argument 'RUN_FILE' (or --replay with the directory of a run).")
    from headrace.cli.ahead import compile_ahead
    from headrace.heap import growing_heap

    with growing_heap():
        from headrace.session import load_config
        from headrace.session.repeating import opened, recorded_settings

    config = load_config(
        run_file if replay is None or run_file else recorded_settings(replay), overrides, like=like
    )  # fmt: skip
    if dry_run:
        from headrace.cli.ahead import plan_line
        from headrace.session.explain import explain
        from headrace.session.prepare import Inputs, prepare

        prepared = prepare(config, Inputs(look=True))
        with opened(replay or "", prepared, resume=resume):
            if as_json:
                print_json(config.model_dump(mode="json"))
            else:
                console().print(explain(prepared))
                console().print(plan_line(prepared))
        return
    from headrace.cli.ending import show_summary
    from headrace.session import train as run

    compile_ahead(config.model, config.engine)
    if as_json:
        config = load_config(config, ["observe.view=none"])
    with resumable():
        summary = run(config, resume=resume, replay=replay or "")
    if as_json:
        print_json(summary)
    else:
        show_summary(summary)
        if summary.versions_agree is not None:
            agree = summary.versions_agree
            console().print(f"replayed {replay}: {agree} of {agree} versions agree, bit for bit", style="bold")
