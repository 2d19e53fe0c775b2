"""The command ``headrace plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headrace.run.cli.commands import PLAN, Verb
from headrace.run.cli.output import console, print_json, starting

if TYPE_CHECKING:
    from headrace.wings.plan import ClusterFile, SearchResult
    from headrace.wings.plan.card import CardRates
    from headrace.wings.plan.cluster_map import ClusterMap
    from headrace.wings.plan.system import Measured


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
    deploy: Path = typer.Option(
        None, metavar="DIR", help="Write the files that start the run on this cluster: Kubernetes, Ray, Slurm."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
) -> None:
    """Predict throughput, idle time, ages and memory of a run on a cluster, and search for better settings."""
    starting(f"reading {run_file} and loading what a plan needs")
    from headrace.base.clock import RealClock
    from headrace.run.session import load_config
    from headrace.wings.plan import load_cluster, make_site
    from headrace.wings.plan import plan as search
    from headrace.wings.plan.cluster_map import make_cluster_map, refuse_misplaced
    from headrace.wings.plan.planning import make_sizing_request

    _refuse_picture(picture)
    config = load_config(run_file, overrides, like=like)
    measured, rates = (None, None) if calibrate is None else _read_calibration(calibrate)
    file = load_cluster(cluster_file)
    if not file.cluster.of_cores:
        refuse_misplaced(config, file.cluster)
    site = make_site(make_sizing_request(config), file, measured, rates=rates)
    # cores are no places of their own: engines and learner share them
    run_map = None if file.cluster.of_cores else make_cluster_map(config, site)
    if deploy is not None:
        _deploy(deploy, (run_file, overrides, like), file)
    result = search(site, RealClock(), seed=seed, generation=generation or None)
    if picture is not None:
        from headrace.wings.plan.picture import draw_plan

        picture.write_bytes(draw_plan(result))
    if as_json:
        print_json({**_make_tree(result), "map": None if run_map is None else run_map.tree()})
        return
    _print(result, run_map)


def _deploy(directory: Path, run: tuple[Path, list[str], str], file: ClusterFile) -> None:
    """Write the files that start a run on the cluster of ``file`` into ``directory``. ``run`` is (run file, overrides,
    recipe). The overrides and the settings that every deployed run needs become arguments in the written files."""
    from headrace.base.errors import ConfigError
    from headrace.run.session import load_config
    from headrace.wings.plan import make_site
    from headrace.wings.plan.cluster_map import make_cluster_map
    from headrace.wings.plan.deploy import deploy_overrides, make_deployment, write_deployment
    from headrace.wings.plan.planning import make_sizing_request

    run_file, overrides, like = run
    if file.cluster.of_cores:
        raise ConfigError(
            f"--deploy {directory}: cluster.accelerator={file.cluster.accelerator!r} is no accelerator that a cluster "
            "counts",
            remedy="plan with the accelerators of the cluster",
        )
    needed = deploy_overrides(load_config(run_file, overrides, like=like))
    config = load_config(run_file, [*overrides, *needed], like=like)
    site = make_site(make_sizing_request(config), file)
    chosen = [*overrides, *needed]
    write_deployment(
        make_deployment(chosen, site, make_cluster_map(config, site), file.deploy, str(directory)), directory
    )
    console(stderr=True).print(f"wrote the files of the deployment into {directory}", style="dim")


def _print(result: SearchResult, run_map: ClusterMap | None) -> None:
    """Print the plan in words, and the map of the run file's parts."""
    from headrace.wings.plan.words import describe

    out = console()
    for line in describe(result):
        out.print(line)
    if run_map is not None:
        out.print("The parts of the run file, as it stands:")
        for line in run_map.lines():
            out.print(line, soft_wrap=True)


def _read_calibration(path: Path) -> tuple[Measured | None, CardRates | None]:
    """Return (costs, ``None``) if ``path`` is the directory of a recorded run, and (``None``, rates) if it is a file
    that ``headrace bench gpu`` has written."""
    if path.is_file():
        from headrace.wings.plan.card import read_rates

        return None, read_rates(path)
    from headrace.wings.plan.calibration import calibrate_from

    return calibrate_from(path), None


def _refuse_picture(picture: Path | None) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if the file ``picture`` cannot be written, or has another suffix
    than ``.svg``."""
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


def _make_tree(result: SearchResult) -> dict[str, Any]:
    """Return the plan ``result`` as an object for ``--json``."""
    from headrace.wings.plan.search import make_plan_row
    from headrace.wings.plan.words import describe

    named = {"asked": result.requested, "best": result.best, "synchronous": result.synchronous}
    return {
        "view": result.site.view,
        "fit": result.site.fit,
        **{name: make_plan_row(result.site, each) for name, each in named.items()},
        "tried": list(result.tried),
        "seconds": result.seconds,
        "words": describe(result),
    }


VERB = Verb(run=plan, group=PLAN, place=10)
