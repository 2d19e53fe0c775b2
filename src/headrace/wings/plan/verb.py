"""The command ``headrace plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.run.cli.commands import PLAN, Verb
from headrace.run.cli.output import console, print_json, starting

if TYPE_CHECKING:
    from headrace.base.types.observation import Account
    from headrace.run.session.config import RunConfig
    from headrace.wings.plan import SearchResult, SizingRequest


def plan(
    run_file: Path = typer.Argument(help="The run file (TOML)."),
    cluster_file: Path = typer.Option(..., "--cluster", help="The cluster file (TOML): accelerators and workload."),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the run."
    ),
    like: str = typer.Option("", "--like", metavar="RECIPE", help="Take open settings from a recipe."),
    calibrate: Path = typer.Option(
        None,
        metavar="RUN|FILE",
        help="Take costs and lengths from this run's directory, or rates from a file of headrace bench gpu.",
    ),
    generation: int = typer.Option(0, min=0, help="Fix how many accelerators generate; 0: searched."),
    seed: int = typer.Option(0, min=0, help="Seed of every simulated run."),
    picture: Path = typer.Option(None, metavar="FILE", help="Draw the simulated runs as an SVG."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Predict throughput, idle time, ages and memory of a run on a cluster, and search for better settings."""
    starting(f"reading {run_file} and loading what a plan needs")
    from headrace.base.clock import RealClock
    from headrace.run.session import load_config
    from headrace.wings.plan import load_cluster, make_site
    from headrace.wings.plan import plan as search
    from headrace.wings.plan.words import describe

    _refuse_picture(picture)
    config = load_config(run_file, overrides, like=like)
    measured, rates = None, None
    if calibrate is not None and calibrate.is_file():
        from headrace.wings.plan.card import read_rates

        rates = read_rates(calibrate)
    elif calibrate is not None:
        from headrace.wings.plan.calibration import calibrated

        measured = calibrated(calibrate)
    site = make_site(asked_of(config), load_cluster(cluster_file), measured, rates=rates)
    found = search(site, RealClock(), seed=seed, generation=generation or None)
    if picture is not None:
        from headrace.wings.plan.picture import plan_svg

        picture.write_bytes(plan_svg(found))
    if as_json:
        print_json(_tree(found))
        return
    out = console()
    for line in describe(found, bound):
        out.print(line)


def _refuse_picture(picture: Path | None) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` for a file ``picture`` that cannot be written as SVG."""
    from headrace.base.errors import ConfigError

    if picture is not None and (picture.is_dir() or not picture.parent.is_dir()):
        raise ConfigError(
            f"--picture {picture} cannot be written: it is a directory, or lies in none that exists",
            remedy="give a file in a directory that exists",
        )
    if picture is not None and picture.suffix.lower() != ".svg":
        raise ConfigError(
            f"--picture {picture}: pictures are written as SVG", remedy=f"name it {picture.with_suffix('.svg')}"
        )


def _tree(found: SearchResult) -> dict[str, Any]:
    """Return the plan as an object for ``--json``."""
    from headrace.wings.plan.search import row_of
    from headrace.wings.plan.words import describe

    named = {"asked": found.requested, "best": found.best, "synchronous": found.synchronous}
    return {
        "view": found.site.view,
        "fit": found.site.fit,
        **{name: row_of(found.site, each) for name, each in named.items()},
        "tried": list(found.tried),
        "seconds": found.seconds,
        "words": describe(found, bound),
    }


def bound(account: Account) -> str:
    """Return what limits the throughput of a run with this account, by the same rule that judges live runs."""
    from headrace.run.observe.verdict import bound_of

    return str(bound_of(account))


def asked_of(config: RunConfig) -> SizingRequest:
    """Return the settings of a run file that a plan needs, with the sizes of its model."""
    from headrace.wings.plan import SizingRequest
    from headrace.wings.plan.catalogue import model

    return SizingRequest(
        shape=model(config.model.path),
        model=config.model,
        engine=config.engine,
        flow=config.flow,
        sync=config.sync,
        learner=config.learner,
        passes=len(config.learner.serving(config.algo.columns).policies),
    )


VERB = Verb(run=plan, group=PLAN, place=10)
