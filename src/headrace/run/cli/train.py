"""``headrace train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.output import console, leave_if_hung_up, print_json, resumable, starting

if TYPE_CHECKING:
    from headrace.run.session.config import RunConfig
    from headrace.run.session.prepare import Prepared

LIKE_HELP = "Take what the run file leaves open from a recipe: --like areal (see: headrace recipes)."
SET_HELP = "Override a setting: --set learner.lr=1e-6 (repeat for more)."


def train(
    run_file: Path = typer.Argument(None, help="The run file (TOML); with --replay, the recorded run's by default."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    like: str = typer.Option("", "--like", metavar="RECIPE", help=LIKE_HELP),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in run.dir."),
    replay: Path = typer.Option(None, "--replay", help="Repeat the run in this directory, bit for bit, in another."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, say what it means, start nothing."),
    defaults: bool = typer.Option(False, "--defaults", help="With --dry-run: every setting, not only those set here."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary (or the settings) as JSON."),
) -> None:
    """Train a model as the run file says."""
    if defaults and not dry_run:
        raise typer.BadParameter("--defaults belongs to --dry-run.")
    if run_file is None and replay is None:
        raise typer.BadParameter("Missing argument 'RUN_FILE' (or --replay with the directory of a run).")
    starting(f"reading {run_file or replay} and loading what a run needs")
    from headrace.base.heap import growing_heap
    from headrace.run.cli.ahead import compile_ahead

    with growing_heap():
        from headrace.run.session import load_config
        from headrace.run.session.repeating import opened, recorded_settings

    config = load_config(
        run_file if replay is None or run_file else recorded_settings(replay), overrides, like=like
    )  # fmt: skip
    if dry_run:
        from headrace.run.session.prepare import Inputs, prepare

        prepared = prepare(config, Inputs(look=True), weights=False)
        with opened(replay or "", prepared, resume=resume):
            _show(prepared, config, defaults=defaults, as_json=as_json)
        return
    from headrace.run.cli.ending import show_summary
    from headrace.run.observe.words import plural
    from headrace.run.session import train as run

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
            agreed = f"{agree} of {plural(agree, 'version')} agree"
            console().print(f"replayed {replay}: {agreed}, bit for bit", style="bold")
    leave_if_hung_up(summary.stopped_by)


def _show(prepared: Prepared, config: RunConfig, *, defaults: bool, as_json: bool) -> None:
    """What a dry run says: what will happen, what it follows from, and on request all the rest."""
    if as_json:
        print_json(config.model_dump(mode="json"))
        return
    from headrace.run.cli.ahead import plan_line
    from headrace.run.session.explain import changed_in_words, every_setting, explain

    out = console()
    out.print(f"{explain(prepared)}\n{plan_line(prepared)}\n\n{changed_in_words(prepared.config, out.width)}\n")
    if defaults:
        out.print(every_setting(prepared.config))
    else:
        out.print("Every other setting has its default: --dry-run --defaults prints them all.", style="dim")
