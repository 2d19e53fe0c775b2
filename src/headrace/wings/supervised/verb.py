"""``headrace sft``, ``dpo``, ``distill`` and ``stages``: train a model on given rows, or in several stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import (
    console,
    exit_if_hung_up,
    format_continuation,
    plan_resumption,
    print_json,
    readable,
    resumable,
    starting,
    table,
    this_command,
)

if TYPE_CHECKING:
    from headrace.wings.supervised.stages import StagesSummary
    from headrace.wings.supervised.summary import TuningSummary

RUN_FILE = typer.Argument(help="The run file (TOML).")
SET = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help="Override a setting: --set learner.lr=1e-5 (repeat).")
STAGE_SET = typer.Option(
    [], "--set", metavar="KEY=VALUE", help="Override a setting: --set stage.2.learner.lr=1e-5, --set run.dir=runs/b."
)
RESUME = typer.Option(False, "--resume", help="Continue the run in run.dir.")
DRY_RUN = typer.Option(False, "--dry-run", help="Check everything, rows too, and describe the run; start nothing.")
AS_JSON = typer.Option(False, "--json", help="Print the summary (or the settings) as JSON.")


def sft(
    run_file: Path = RUN_FILE,
    overrides: list[str] = SET,
    resume: bool = RESUME,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Fine-tune a model on conversations, completions, text or tokens."""
    _run("sft", run_file, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


def dpo(
    run_file: Path = RUN_FILE,
    overrides: list[str] = SET,
    resume: bool = RESUME,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Train a model on pairs of answers (DPO, IPO, SimPO, ORPO), or on single ones with a label (KTO)."""
    _run("dpo", run_file, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


def distill(
    run_file: Path = RUN_FILE,
    overrides: list[str] = SET,
    resume: bool = RESUME,
    dry_run: bool = DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Train a model towards a teacher, on rows: a model, a server, or what the rows say of one."""
    _run("distill", run_file, overrides, resume=resume, dry_run=dry_run, as_json=as_json)


def stages(
    run_file: Path = RUN_FILE,
    overrides: list[str] = STAGE_SET,
    resume: bool = typer.Option(False, "--resume", help="Go on with the stage that was stopped or killed."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check every stage, rows too; start nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Run sft, dpo and rl one after the other, each beginning with the weights of the one before."""
    starting(f"reading {run_file} and loading what its stages need")
    from headrace.base.heap import gc_disabled

    with gc_disabled():
        from headrace.wings.supervised.stages import STAGES_FILE, check_stages, load_stages, run_stages
    loaded = load_stages(run_file, (*overrides, *(["observe.view=none"] if as_json else [])))
    if dry_run:
        check_stages(loaded)
        for stage in loaded.stages:
            console().print(f"stage {stage.name}: {stage.directory}, ends with {stage.model}")
        return
    again = this_command("--resume")
    with resumable(again, (loaded.directory / STAGES_FILE).exists):
        summary = run_stages(loaded, resume=resume, tell=starting)
    if as_json:
        print_json(summary)
    else:
        _show_stages(summary, again)
    exit_if_hung_up(summary.stopped_by)


def _show_stages(summary: StagesSummary, again: str) -> None:
    """Print a table of the stages that have ended, with their pass@k and the directories of their weights. If the
    stages were stopped, also print ``again``, the command that resumes them."""
    out = console()
    out.print(f"\n{summary.status}", style="bold")
    ks = sorted({k for each in summary.results for k in each.pass_at})
    stage_table = table("", "stage", "steps", *(f"pass@{k}" for k in ks), "weights")
    for each in summary.results:
        shares = [f"{each.pass_at[k]:.4f}" if k in each.pass_at else "" for k in ks]
        stage_table.add_row(each.name, str(each.steps or ""), *shares, readable(each.model))
    out.print(stage_table)
    if summary.status != "finished":
        out.print(format_continuation(again), style="bold")


def _run(verb: str, run_file: Path, overrides: Sequence[str], *, resume: bool, dry_run: bool, as_json: bool) -> None:
    """Run ``headrace sft``, ``dpo`` or ``distill``, named by ``verb``, with ``run_file`` and its ``overrides``: with
    ``dry_run`` only describe the run, otherwise train and print the summary. With ``resume``, continue the run of an
    earlier life. With ``as_json`` the output is JSON."""
    starting(f"reading {run_file} and loading what a run needs")
    from headrace.wings.supervised.config import VERBS, load_tuning

    config = load_tuning(VERBS[verb], run_file, (*overrides, *(["observe.view=none"] if as_json else [])))
    if dry_run:
        from headrace.wings.supervised.preparing import explain_tuning, prepare_tuning

        prepared = prepare_tuning(config, weights=False)
        if as_json:
            print_json(config.model_dump(mode="json"))
        else:
            console().print(explain_tuning(prepared))
        return
    from headrace.base.heap import gc_disabled

    with gc_disabled():
        from headrace.flow.ledger.opening import has_ledger
        from headrace.wings.supervised.session import tune
    directory, again = plan_resumption(config.run.dir, prefix=f"{config.verb}-")
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
    with resumable(again, lambda: has_ledger(Path(directory))):
        summary = tune(config, resume=resume)
    if as_json:
        print_json(summary)
    else:
        _show(summary, again)
    exit_if_hung_up(summary.stopped_by)


def _show(summary: TuningSummary, again: str) -> None:
    """Print the main figures of the run with the summary ``summary``, its warnings and its directory. If it was
    stopped, also print ``again``, the command that resumes it."""
    from headrace.run.observe.words import duration, number, plural

    out = console()
    out.print()
    out.print(f"{summary.status} after {plural(summary.steps, 'step')}", style="bold")
    rows = summary.ledger.groups
    figures = [("loss of the batches", f"{number(summary.loss_first)} → {number(summary.loss_last)}")]
    figures += [
        (f"held-out {name}", f"{number(summary.eval_first.get(name))} → {number(value)}")
        for name, value in summary.eval_last.items()
    ]
    figures += [
        (f"measured {name}", f"{number(summary.rewards_first.get(name))} → {number(value)}")
        for name, value in summary.rewards_last.items()
    ]
    figures += [
        ("training took", duration(summary.wall_s)),
        ("trained", f"{plural(summary.tokens_trained, 'token')}, {summary.trained_tok_s:,.0f} per second"),
        ("rows", f"{rows.submitted:,} taken = {rows.trained:,} trained + {rows.in_flight:,} in flight"),
    ]
    for name, figure in figures:
        out.print(f"  {name:<28} {figure}")
    for warning in summary.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    report = Path(summary.run_dir) / "report" / "report.html"
    if report.exists():
        out.print(f"report   {report}")
    out.print(f"run      {readable(summary.run_dir)}")
    if summary.status == "stopped":
        out.print(format_continuation(again), style="bold")
    out.print(f"export   headrace export {readable(summary.run_dir)} DIRECTORY", style="dim")


SFT = Verb(run=sft, group=BEGIN, place=24)
DPO = Verb(run=dpo, group=BEGIN, place=26)
DISTILL = Verb(run=distill, group=BEGIN, place=27)
STAGES = Verb(run=stages, group=BEGIN, place=28)
