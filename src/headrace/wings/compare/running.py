"""The execution of a comparison: recipes are run one after another, each in its own run directory, and finished runs
are not repeated. The base of a comparison is the run file that all recipes share, or the demo."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.base.config import leaves
from headrace.base.errors import ConfigError, HeadraceError
from headrace.flow.ledger.opening import has_ledger
from headrace.launch.forking import keep_fork_server
from headrace.run.session import RunConfig, load_config, train
from headrace.run.session.config import RunFile, read_run_tree
from headrace.run.session.directory import CONFIG_FILE, read_summary
from headrace.run.session.recipes import left_open, recipe
from headrace.wings.compare.rows import RecipeRow, read_recipe_row, select_decided
from headrace.wings.recipes.demo import build_demo, lay_out

DEMO_STEPS = 100
"""Default number of steps of each run if the demo is the base."""
_SET_BY_COMPARISON = ("run.dir", "run.steps", "run.seed")
"""Settings that the comparison itself sets for each run, so that overrides of them are refused."""
_IRRELEVANT_SECTIONS = ("observe", "launch", "env")
"""Sections in which an existing run may differ from the requested run. They determine the display, the machines of
processes, and paths, but not the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig:
    """The settings of a comparison, from the command line."""

    recipes: Sequence[str]
    """Names of the recipes, in the order of the table."""
    directory: Path
    """Directory with one run directory per recipe, which has the recipe's name, and with the demo."""
    run_file: RunFile | None = None
    """Run file with model, task and sizes; ``None``: the demo, which is created in ``directory``. A recipe's settings
    override those of the run file, except ``model.lora``, which the run file keeps if it has it."""
    steps: int | None = None
    """Number of steps of each run; ``None``: the run file's number, or :data:`DEMO_STEPS` for the demo."""
    seed: int | None = None
    """Seed of every run and of the demo; ``None``: the run file's seed, or 0."""
    overrides: Sequence[str] = ()
    """Settings as ``section.key=value`` that override both the run file and the recipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """The results of a comparison so far, from which tables and pictures are made."""

    directory: Path
    base: str
    """Name of the run file, or "the demo"."""
    rows: tuple[RecipeRow, ...]
    """One row per recipe, in the requested order."""
    stopped: bool
    """Whether the user has stopped the last run; the remaining recipes were not started."""


def compare(
    config: ComparisonConfig,
    report: Callable[[str], None] = lambda _: None,
    on_row: Callable[[RecipeComparison], None] = lambda _: None,
) -> RecipeComparison:
    """Run every recipe, or read the results of a recipe that has finished before, and return the comparison. After
    every recipe, ``on_row`` is called with the comparison so far; ``report`` is called with lines of progress. If the
    run of a recipe fails, its row contains the reason, and the next recipe is run. If the user stops a run, the
    comparison ends.

    Raises :class:`~headrace.base.errors.ConfigError` before the first run starts if a recipe does not fit the run file,
    or if a directory contains a run with other settings.
    """
    names = [recipe(name).name for name in dict.fromkeys(config.recipes)]
    config.directory.mkdir(parents=True, exist_ok=True)
    tree, base = _read_shared_settings(config)
    configs = {name: _make_recipe_config(config, tree, name) for name in names}
    for name, run_config in configs.items():
        _refuse_other_run(config.directory / name, run_config)
    if config.run_file is None and not (_get_demo_directory(config) / "model" / "config.json").exists():
        report("the demo's model is made; the supervised phase takes about 20 s")
        build_demo(_get_demo_directory(config), seed=config.seed or 0)
    comparison = RecipeComparison(directory=config.directory, base=base, rows=(), stopped=False)
    with keep_fork_server():  # the runs differ in settings, not in the libraries that their parts import
        for place, name in enumerate(names, start=1):
            row = _run_recipe(name, configs[name], partial(_report_progress, report, f"{place}/{len(names)} {name}"))
            comparison = replace(comparison, rows=(*comparison.rows, row), stopped=row.status == "stopped")
            on_row(comparison)
            if comparison.stopped:
                break
    return comparison


def _report_progress(report: Callable[[str], None], label: str, words: str) -> None:
    """Call ``report`` with the line ``words``, preceded by the ``label`` of its run, such as ``2/5 areal``."""
    report(f"{label}: {words}")


def _get_demo_directory(config: ComparisonConfig) -> Path:
    """Return the directory of the demo, which is in the directory of the comparison."""
    return config.directory / "demo"


def _read_shared_settings(config: ComparisonConfig) -> tuple[dict[str, Any], str]:
    """Return (settings that all runs share, name of the base for the table). The settings are those of the run file or
    of the demo, without the settings that recipes decide. Raises :class:`~headrace.base.errors.ConfigError` for an
    override of a setting that the comparison itself sets."""
    refused = [text for text in config.overrides if text.partition("=")[0].strip() in _SET_BY_COMPARISON]
    if refused:
        raise ConfigError(
            f"--set {refused[0]}: a comparison has a directory for each run, and one budget and seed for all",
            remedy="give --dir, --steps or --seed",
        )
    if config.run_file is not None:
        tree = left_open(read_run_tree(config.run_file))
        return tree, str(config.run_file) if isinstance(config.run_file, str | Path) else "a run file"
    run_file = _get_demo_directory(config) / "demo.toml"
    if not run_file.exists():
        lay_out(run_file.parent, seed=config.seed or 0)
    tree = left_open(read_run_tree(run_file))
    tree["run"] = {"steps": DEMO_STEPS, "seed": 0}
    return tree, "the demo"


def _make_recipe_config(config: ComparisonConfig, tree: Mapping[str, Any], name: str) -> RunConfig:
    """Return the validated settings of the run of the recipe ``name``: the shared settings ``tree``, the settings of
    the recipe, and the directory, steps and seed of the comparison. Raises
    :class:`~headrace.base.errors.ConfigError`, with the name of the recipe, for invalid settings."""
    budget = {"run.steps": config.steps, "run.seed": config.seed}
    own = [
        f"run.dir={config.directory / name}",
        *(f"{key}={value}" for key, value in budget.items() if value is not None),
    ]
    quiet = ["observe.view=none", "observe.report=false"]
    try:
        return load_config(tree, [*quiet, *config.overrides, *own], like=name)
    except ConfigError as error:
        error.problem = f"{name}: {error.problem}"
        raise


def _refuse_other_run(run_dir: Path, config: RunConfig) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``run_dir`` contains a run whose settings differ from
    ``config``, since its figures would not be comparable with those of the other runs."""
    if not has_ledger(run_dir) and read_summary(run_dir) is None:
        return
    try:
        found = leaves(json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} holds a run whose {CONFIG_FILE} cannot be read: {error}", remedy="choose another --dir"
        ) from None
    requested = leaves(config.model_dump(mode="json"))
    for key in sorted({*found, *requested}):
        if key.partition(".")[0] not in _IRRELEVANT_SECTIONS and found.get(key) != requested.get(key):
            raise ConfigError(
                f"{run_dir} holds a run with {key}={found.get(key)!r}, and {requested.get(key)!r} is requested",
                remedy="choose another --dir, or remove that run",
            )


def _run_recipe(name: str, config: RunConfig, report: Callable[[str], None]) -> RecipeRow:
    """Run the recipe ``name`` with the settings ``config``, or resume its run, unless it has finished before; return
    its row. If the run fails, the row contains the cause. ``report`` is called with lines of progress."""
    run_dir = Path(config.run.dir)
    before = read_summary(run_dir)
    if before is not None and before["status"] == "finished":
        report("has finished before")
        return read_recipe_row(name, run_dir)
    report(f"{config.run.steps} steps")
    try:
        train(config, resume=has_ledger(run_dir))
    except HeadraceError as error:
        return RecipeRow(
            recipe=name,
            status="failed",
            cause=error.problem.partition("\n")[0],
            settings=select_decided(config.model_dump(mode="json")),
            run_dir=str(run_dir),
        )
    return read_recipe_row(name, run_dir)
