"""The command ``headrace demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.progress import Progress

from headrace.run.cli.commands import BEGIN, Verb
from headrace.run.cli.output import command_line, console, exit_if_hung_up, print_json, resumable, starting
from headrace.run.cli.train import LIKE_HELP, SET_HELP


def demo(
    overrides: list[str] = typer.Option([], "--set", metavar="SECTION.KEY=VALUE", help=SET_HELP),
    like: str = typer.Option("", "--like", metavar="RECIPE", help=LIKE_HELP),
    seed: int = typer.Option(0, "--seed", help="Seed of the model, the split of the rows, and all sampling."),
    directory: Path = typer.Option(None, "--dir", help="Directory of the demo; default: a new one in runs/."),
    mixture: bool = typer.Option(False, "--mixture", help="A mixture of experts (qwen3_moe) instead of a dense model."),
    hybrid: bool = typer.Option(False, "--hybrid", help="A hybrid with linear attention (qwen3_5_text) instead."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Train a small model to add on this machine, and watch the reward climb.

    A model of 0.4M parameters is made and imitates a careless teacher, who forgets the carry in 60% of the
    demonstrations. Reinforcement learning, which sees only whether an answer is right, does the rest.
    """
    starting("loading what the demo needs; all of it takes about two minutes on two cores")
    from headrace.base.heap import gc_disabled
    from headrace.models.kernels.build import build_ahead

    build_ahead()  # compiles in the background, and has finished long before the supervised phase ends
    with gc_disabled():
        from headrace.base.clock import RealClock
        from headrace.base.errors import ConfigError
        from headrace.flow.ledger.opening import has_ledger
        from headrace.run.cli.train import show_summary
        from headrace.run.session import load_config
        from headrace.run.session import train as run
        from headrace.run.session.directory import choose_directory
        from headrace.wings.recipes.demo import build_demo

    target = directory or choose_directory("", RealClock(), prefix="demo-")
    if has_ledger(target / "run"):
        remedy = f"choose another --dir, or: headrace train {target / 'demo.toml'} --set run.dir=runs/again"
        raise ConfigError(f"--dir={str(target)!r} holds a demo already", remedy=remedy)
    if mixture and hybrid:
        raise ConfigError("--mixture and --hybrid name two models", remedy="give one of them")
    kind = "mixture" if mixture else "hybrid" if hybrid else "dense"
    made = build_demo(target, seed=seed, kind=kind) if as_json else _build_with_progress(target, seed, kind)
    quiet = ["observe.view=none"] if as_json else []
    settings = [f"run.dir={target / 'run'}", *overrides, *quiet]
    recipe = ["--like", like] if like else []
    if like:
        leave_open(made.run_file)
    again = command_line("train", str(made.run_file), *recipe, *(f"--set={each}" for each in settings), "--resume")
    config = load_config(made.run_file, settings, like=like)
    with resumable(again, lambda: has_ledger(Path(config.run.dir))):
        summary = run(config)
    if as_json:
        print_json(summary)
    else:
        show_summary(summary, again)
        asked = (f"--set={each}" for each in overrides)
        anew = command_line("train", str(made.run_file), *recipe, *asked, "--set", "run.dir=runs/again")
        console().print(f"again    {anew}")
    exit_if_hung_up(summary.stopped_by)


def _build_with_progress(target: Path, seed: int, kind: str) -> Any:
    """Build the demo in ``target`` with a model of this ``kind``, and return the demo's paths. A progress bar on the
    terminal shows the progress of the supervised phase."""
    from headrace.wings.recipes.demo import build_demo

    console().print(f"The demo is made in {target}: model, rows, reward.py, demo.toml", style="bold")
    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task("supervised phase: a careless teacher")
        return build_demo(
            target,
            seed=seed,
            kind=kind,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def leave_open(run_file: Path) -> None:
    """Remove the settings that recipes decide from the run file of a demo, so that the recipe chosen with ``--like``
    can set them. Every setting must be on one line, as in the demo's run file."""
    from headrace.run.session.recipes import DECIDED

    kept, section = list[str](), ""
    for line in run_file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith("["):
            section = line.strip().strip("[]")
        if line.partition("=")[0].strip() not in DECIDED.get(section, ()):
            kept.append(line)
    run_file.write_text("".join(kept), encoding="utf-8")


VERB = Verb(run=demo, group=BEGIN, place=30)
