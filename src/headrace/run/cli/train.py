"""``headrace train``: run the training that a run file describes, or with ``--dry-run`` check and describe it."""

from __future__ import annotations

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
)

if TYPE_CHECKING:
    from headrace.control.metrics.summary import Summary
    from headrace.engine.config import EngineConfig
    from headrace.models.config import ModelConfig
    from headrace.run.session.config import RunConfig
    from headrace.run.session.prepare import Prepared

# a recipe contains the settings with which a run behaves like a known system
LIKE_HELP = "Take the settings that the run file leaves open from a recipe: --like areal (see: headrace recipes)."
SET_HELP = "Override a setting: --set learner.lr=1e-6 (repeat for more)."


def train(
    run_file: Path = typer.Argument(None, help="The run file (TOML); with --replay, the recorded run's by default."),
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    like: str = typer.Option("", "--like", metavar="RECIPE", help=LIKE_HELP),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in run.dir."),
    replay: Path = typer.Option(None, "--replay", help="Repeat the run in this directory, bit for bit, in another."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything and describe the run; start nothing."),
    defaults: bool = typer.Option(False, "--defaults", help="With --dry-run: print every setting, changed or not."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary (or the settings) as JSON."),
) -> None:
    """Train a model as the run file says."""
    if defaults and not dry_run:
        raise typer.BadParameter("--defaults belongs to --dry-run.")
    if run_file is None and replay is None:
        raise typer.BadParameter("Missing argument 'RUN_FILE' (or --replay with the directory of a run).")
    starting(f"reading {run_file or replay} and loading what a run needs")
    from headrace.base.heap import gc_disabled

    with gc_disabled():
        from headrace.run.session import load_config
        from headrace.run.session.repeating import open_recording, read_settings_to_replay

    starting("checking the settings, the rows, the model and this machine")
    config = load_config(
        run_file if replay is None or run_file else read_settings_to_replay(replay), overrides, like=like
    )  # fmt: skip
    if dry_run:
        from headrace.run.session.prepare import Inputs, prepare

        prepared = prepare(config, Inputs(thorough=True), weights=False)
        with open_recording(replay or "", prepared, resume=resume):
            _show(prepared, config, defaults=defaults, as_json=as_json)
        return
    if as_json:
        config = load_config(config, ["observe.view=none"])
    _train(config, replay=replay, resume=resume, as_json=as_json)


def _train(config: RunConfig, *, replay: Path | None, resume: bool, as_json: bool) -> None:
    """Run the training that ``config`` describes, and print its summary, with ``as_json`` as JSON. ``resume`` continues
    the run in its directory. ``replay`` is the directory of a recorded run to repeat; ``None`` for an ordinary run."""
    from headrace.flow.ledger.opening import has_ledger
    from headrace.run.observe.words import plural
    from headrace.run.session import train as run

    compile_ahead(config.model, config.engine)
    directory, resume_command = plan_resumption(config.run.dir)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
    with resumable(resume_command, lambda: has_ledger(Path(directory))):
        summary = run(config, resume=resume, replay=replay or "")
    if as_json:
        print_json(summary)
    else:
        show_summary(summary, resume_command)
        if (agree := summary.versions_agree) is not None:
            agreed = f"{agree} of {plural(agree, 'version')} agree"
            console().print(f"replayed {replay}: {agreed}, bit for bit", style="bold")
    exit_if_hung_up(summary.stopped_by)


def _show(prepared: Prepared, config: RunConfig, *, defaults: bool, as_json: bool) -> None:
    """Print the text of a dry run: a description of the run ``prepared``, the settings that differ from their defaults,
    and with ``defaults`` all settings; with ``as_json`` only the settings ``config``, as JSON."""
    if as_json:
        print_json(config.model_dump(mode="json"))
        return
    from headrace.run.session.explain import describe_non_default_settings, explain, format_all_settings, make_previews

    out = console()
    changed = describe_non_default_settings(prepared.config, out.width)
    out.print(f"{explain(prepared)}\n{make_previews(prepared)}\n\n{changed}\n")
    if defaults:
        out.print(format_all_settings(prepared.config))
    else:
        out.print("Every other setting has its default: --dry-run --defaults prints them all.", style="dim")


def compile_ahead(model: ModelConfig, engine: EngineConfig) -> None:
    """Start to compile the CPU kernels of the engine in the background, if a run with the settings ``model`` and
    ``engine`` uses kernels that are not compiled yet, so that they are ready sooner when the engine starts."""
    from headrace.models.devices import AUTO, CPU

    if engine.can_fuse and engine.device in (AUTO, CPU):
        from headrace.models.kernels.build import BFLOAT16, build_ahead

        build_ahead(*[BFLOAT16] * (model.dtype == "bfloat16"))


def show_summary(summary: Summary, resume_command: str) -> None:
    """Print the main figures of a run that has ended, its verdict, its warnings and the paths of its files. For a run
    that was stopped, also print ``resume_command``, the command line that continues it."""
    from headrace.run.observe.words import plural

    out = console()
    out.print()
    out.print(f"{summary.status} after {plural(summary.steps, 'step')}", style="bold")
    if summary.versions and summary.versions[0] > 0:  # the counts of groups below include the run's earlier lives
        out.print(f"continued at step {summary.versions[0]}: times, tokens, ages and mismatch are those since then")
    for name, figure in _format_figures(summary):
        out.print(f"  {name:<28} {figure}")
    if summary.verdict:
        out.print(readable(summary.verdict))
    for name, counts in summary.reward_failures.items():
        share = f"{counts.failed:,} of {counts.calls:,} calls failed"
        out.print(f"reward {readable(name)}: {share}; the first: {readable(counts.first_cause)}", style="yellow")
    for warning in summary.warnings:
        out.print(f"warning: {readable(warning)}", style="yellow")
    report = Path(summary.run_dir) / "report" / "report.html"
    if report.exists():
        out.print(f"report   {report}")
    out.print(f"run      {readable(summary.run_dir)}")
    if summary.status == "stopped" and resume_command:
        out.print(format_continuation(resume_command), style="bold")


def _format_figures(summary: Summary) -> list[tuple[str, str]]:
    """Return the names and values, as text, of the figures that are printed at the end of a run."""
    from headrace.run.observe.words import duration, number, percent, plural

    gap, groups = summary.commit_gap_ms, summary.ledger.groups
    dropped = sum(groups.dropped.values())
    rest = f"{groups.trained:,} trained + {dropped:,} dropped + {groups.in_flight:,} in flight"
    restarts = plural(summary.sequences_restarted, "restart")
    held_out = (summary.eval_before, summary.eval_after)
    shown = [("held-out mean reward", " → ".join(map(number, held_out)))] if held_out != (None, None) else []
    return [
        *shown,
        ("mean reward of the batches", f"{number(summary.reward_first)} → {number(summary.reward_last)}"),
        ("training took", duration(summary.wall_s)),
        ("generated", f"{plural(summary.tokens_generated, 'token')}, {summary.generated_tok_s:,.0f} per second"),
        ("trained", f"{plural(summary.tokens_trained, 'token')}, {summary.trained_tok_s:,.0f} per second"),
        ("idle", f"engine {percent(summary.engine_idle_frac)}, learner {percent(summary.learner_idle_frac)}"),
        ("commit gap", f"median {duration(gap.p50 / 1e3)}, p99 {duration(gap.p99 / 1e3)}; {restarts}"),
        ("was blocked by the sync", f"{summary.exposed_sync_frac:.2%} of the learner's time"),
        ("oldest token trained", plural(summary.max_token_age, "version")),
        (
            "engine against learner",
            f"mean |Δ logprob| {number(summary.mismatch_abs)} at equal weights, at most "
            f"{number(summary.mismatch_abs_most)} over the fresh tokens of a step",
        ),
        ("groups", f"{groups.submitted:,} submitted = {rest}"),
    ]


VERB = Verb(run=train, group=BEGIN, place=20)
