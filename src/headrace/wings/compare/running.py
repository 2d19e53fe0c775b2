"""Runs recipes one after another, each in its own directory. A run that has finished there is not repeated. The base of
a comparison is the run file that all recipes share, or the demo."""

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
from headrace.run.session.config import RunFile, run_tree
from headrace.run.session.directory import CONFIG_FILE, read_summary
from headrace.run.session.recipes import left_open, recipe
from headrace.wings.compare.rows import RecipeRow, decided, row_of
from headrace.wings.recipes.demo import build_demo, lay_out

DEMO_STEPS = 100
"""Default number of steps of each run if the demo is the base."""
_SET_BY_COMPARISON = ("run.dir", "run.steps", "run.seed")
"""Settings that the comparison sets itself."""
_IRRELEVANT_SECTIONS = ("observe", "launch", "env")
"""Sections in which an existing run may differ from the requested one: they change what is displayed, where processes
run, and paths, but not the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig:
    """The settings of a comparison, from the command line."""

    recipes: Sequence[str]
    """Names of the recipes, in the order of the table."""
    directory: Path
    """Directory that holds one run directory per recipe, named after it, and the demo."""
    run_file: RunFile | None = None
    """Run file with model, task and sizes; ``None``: the demo, which is created in ``directory``. Settings that
    recipes decide override it, except that a run file with ``model.lora`` keeps its own."""
    steps: int | None = None
    """Number of steps of each run; ``None``: the run file's, or :data:`DEMO_STEPS` for the demo."""
    seed: int | None = None
    """Seed of every run and of the demo; ``None``: the run file's, or 0."""
    overrides: Sequence[str] = ()
    """Settings as ``section.key=value`` that override both the run file and the recipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """The results of a comparison so far, which tables and pictures are made from."""

    directory: Path
    base: str
    """Name of the run file, or "the demo"."""
    rows: tuple[RecipeRow, ...]
    """One row per recipe, in the requested order."""
    stopped: bool
    """Whether the last run was stopped by the user; the recipes after it were not started."""


def compare(
    config: ComparisonConfig,
    report: Callable[[str], None] = lambda _: None,
    each: Callable[[RecipeComparison], None] = lambda _: None,
) -> RecipeComparison:
    """Run every recipe, or read its results if it has finished before, and return the comparison. ``each`` is called
    with the comparison so far after every recipe, and ``report`` with lines of progress. A recipe whose run fails gets
    a row with the reason, and the next recipe is run; a run that the user stops ends the comparison.

    Raises :class:`~headrace.base.errors.ConfigError` before anything runs if a recipe does not fit the run file, or if
    a directory holds a run with other settings.
    """
    names = [recipe(name).name for name in dict.fromkeys(config.recipes)]
    config.directory.mkdir(parents=True, exist_ok=True)
    tree, base = _base(config)
    configs = {name: _config(config, tree, name) for name in names}
    for name, run_config in configs.items():
        _refuse_other_run(config.directory / name, run_config)
    if config.run_file is None and not (_demo(config) / "model" / "config.json").exists():
        report("the demo's model is made; the supervised phase takes about 20 s")
        build_demo(_demo(config), seed=config.seed or 0)
    made = RecipeComparison(directory=config.directory, base=base, rows=(), stopped=False)
    with keep_fork_server():  # the runs differ in settings, not in the libraries that their parts import
        for place, name in enumerate(names, start=1):
            row = _row(name, configs[name], partial(_report_line, report, f"{place}/{len(names)} {name}"))
            made = replace(made, rows=(*made.rows, row), stopped=row.status == "stopped")
            each(made)
            if made.stopped:
                break
    return made


def _report_line(report: Callable[[str], None], where: str, words: str) -> None:
    """Report the line ``words`` about the run that ``where`` names, such as ``2/5 areal``."""
    report(f"{where}: {words}")


def _demo(config: ComparisonConfig) -> Path:
    """Return the directory of the demo, in that of the comparison."""
    return config.directory / "demo"


def _base(config: ComparisonConfig) -> tuple[dict[str, Any], str]:
    """Return the settings that all runs share, those of the run file or the demo without what recipes decide, and the
    name of the base for the table. Raises :class:`~headrace.base.errors.ConfigError` for an override that the
    comparison sets itself."""
    refused = [text for text in config.overrides if text.partition("=")[0].strip() in _SET_BY_COMPARISON]
    if refused:
        raise ConfigError(
            f"--set {refused[0]}: a comparison has a directory for each run, and one budget and seed for all",
            remedy="give --dir, --steps or --seed",
        )
    if config.run_file is not None:
        tree = left_open(run_tree(config.run_file))
        return tree, str(config.run_file) if isinstance(config.run_file, str | Path) else "a run file"
    run_file = _demo(config) / "demo.toml"
    if not run_file.exists():
        lay_out(run_file.parent, seed=config.seed or 0)
    tree = left_open(run_tree(run_file))
    tree["run"] = {"steps": DEMO_STEPS, "seed": 0}
    return tree, "the demo"


def _config(config: ComparisonConfig, tree: Mapping[str, Any], name: str) -> RunConfig:
    """Return the checked settings of the run of the recipe ``name``: the shared settings ``tree`` with those of the
    recipe, and with the directory, steps and seed of the comparison. Raises :class:`~headrace.base.errors.ConfigError`,
    whose text names the recipe."""
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
    """Raise :class:`~headrace.base.errors.ConfigError` if ``run_dir`` holds a run whose settings differ from
    ``config``: its figures could not be compared with the others."""
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


def _row(name: str, config: RunConfig, report: Callable[[str], None]) -> RecipeRow:
    """Train the recipe ``name`` with its settings, or resume its run, unless it has finished before; return its row. A
    run that fails has a row with the cause. ``report`` is called with lines of progress."""
    run_dir = Path(config.run.dir)
    before = read_summary(run_dir)
    if before is not None and before["status"] == "finished":
        report("has finished before")
        return row_of(name, run_dir)
    report(f"{config.run.steps} steps")
    try:
        train(config, resume=has_ledger(run_dir))
    except HeadraceError as error:
        return RecipeRow(
            recipe=name,
            status="failed",
            cause=error.problem.partition("\n")[0],
            settings=decided(config.model_dump(mode="json")),
            run_dir=str(run_dir),
        )
    return row_of(name, run_dir)
