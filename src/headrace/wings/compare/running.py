"""Runs recipes one after the other, each in its directory; what has finished there is not run again."""

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
from headrace.run.session import RunConfig, load_config, train
from headrace.run.session.config import RunFile, run_tree
from headrace.run.session.directory import CONFIG_FILE, read_summary
from headrace.wings.compare.rows import RecipeRow, decided, row_of
from headrace.wings.recipes.demo import build_demo, lay_out
from headrace.wings.recipes.systems import left_open, recipe

DEMO_STEPS = 100
"""Of every run, where the demo is compared on and nobody says how many."""
_OWN = ("run.dir", "run.steps", "run.seed")
"""Settings that a comparison makes itself."""
_SHOWN = ("observe", "launch", "env")
"""Sections that may differ between a run that is found and the one that is asked for: what is shown, where, and paths
that were filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig:
    """What is compared, on what."""

    recipes: Sequence[str]
    """Their names."""
    directory: Path
    """Holds a run directory for each, named after it, and the demo."""
    run_file: RunFile | None = None
    """Model, task and sizes; ``None``: the demo, made in the directory. What recipes decide is theirs, whatever it
    says; but a run file with ``model.lora`` keeps its own."""
    steps: int | None = None
    """The budget of each; ``None``: what the run file says, or :data:`DEMO_STEPS`."""
    seed: int | None = None
    """Of every run, and of the demo; ``None``: what the run file says, or 0."""
    overrides: Sequence[str] = ()
    """``section.key=value``, over run file and recipe alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """What came of it."""

    directory: Path
    base: str
    """What was trained on what."""
    rows: tuple[RecipeRow, ...]
    """In the order in which they were asked for."""
    stopped: bool
    """Whether the last of them was stopped, and others were not begun."""


def compare(
    terms: ComparisonConfig,
    tell: Callable[[str], None] = lambda _: None,
    each: Callable[[RecipeComparison], None] = lambda _: None,
) -> RecipeComparison:
    """Run every recipe, or take what it came to from its directory; ``each`` is told the comparison so far after every
    one. A recipe whose run fails has a row that says why, and the others are run.

    Raises :class:`~headrace.base.errors.ConfigError` before anything runs, where a recipe does not fit the run file, or
    a directory holds a run of other settings.
    """
    names = [recipe(name).name for name in dict.fromkeys(terms.recipes)]
    terms.directory.mkdir(parents=True, exist_ok=True)
    tree, base = _base(terms)
    configs = {name: _config(terms, tree, name) for name in names}
    for name, config in configs.items():
        _refuse_other_run(terms.directory / name, config)
    if terms.run_file is None and not (_demo(terms) / "model" / "config.json").exists():
        tell("the demo's model is made; the supervised phase takes about 20 s")
        build_demo(_demo(terms), seed=terms.seed or 0)
    made = RecipeComparison(directory=terms.directory, base=base, rows=(), stopped=False)
    for place, name in enumerate(names, start=1):
        row = _row(name, configs[name], partial(_tell, tell, f"{place}/{len(names)} {name}"))
        made = replace(made, rows=(*made.rows, row), stopped=row.status == "stopped")
        each(made)
        if made.stopped:
            break
    return made


def _tell(tell: Callable[[str], None], where: str, words: str) -> None:
    tell(f"{where}: {words}")


def _demo(terms: ComparisonConfig) -> Path:
    return terms.directory / "demo"


def _base(terms: ComparisonConfig) -> tuple[dict[str, Any], str]:
    """The settings that all have, and what they are in words."""
    refused = [text for text in terms.overrides if text.partition("=")[0].strip() in _OWN]
    if refused:
        raise ConfigError(
            f"--set {refused[0]}: a comparison has a directory for each run, and one budget and seed for all",
            remedy="give --dir, --steps or --seed",
        )
    if terms.run_file is not None:
        tree = left_open(run_tree(terms.run_file))
        return tree, str(terms.run_file) if isinstance(terms.run_file, str | Path) else "a run file"
    run_file = _demo(terms) / "demo.toml"
    if not run_file.exists():
        lay_out(run_file.parent, seed=terms.seed or 0)
    tree = left_open(run_tree(run_file))
    tree["run"] = {"steps": DEMO_STEPS, "seed": 0}
    return tree, "the demo"


def _config(terms: ComparisonConfig, tree: Mapping[str, Any], name: str) -> RunConfig:
    """The run of one recipe."""
    budget = {"run.steps": terms.steps, "run.seed": terms.seed}
    own = [
        f"run.dir={terms.directory / name}",
        *(f"{key}={value}" for key, value in budget.items() if value is not None),
    ]
    quiet = ["observe.view=none", "observe.report=false"]
    try:
        return load_config(tree, [*quiet, *terms.overrides, *own], like=name)
    except ConfigError as error:
        error.problem = f"{name}: {error.problem}"
        raise


def _refuse_other_run(run_dir: Path, config: RunConfig) -> None:
    """A table of runs of several kinds would compare nothing."""
    if not has_ledger(run_dir) and read_summary(run_dir) is None:
        return
    try:
        found = leaves(json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run_dir} holds a run whose {CONFIG_FILE} cannot be read: {error}", remedy="choose another --dir"
        ) from None
    asked = leaves(config.model_dump(mode="json"))
    for key in sorted({*found, *asked}):
        if key.partition(".")[0] not in _SHOWN and found.get(key) != asked.get(key):
            raise ConfigError(
                f"{run_dir} holds a run with {key}={found.get(key)!r}, and {asked.get(key)!r} is asked for",
                remedy="choose another --dir, or remove that run",
            )


def _row(name: str, config: RunConfig, tell: Callable[[str], None]) -> RecipeRow:
    run_dir = Path(config.run.dir)
    before = read_summary(run_dir)
    if before is not None and before["status"] == "finished":
        tell("has finished before")
        return row_of(name, run_dir)
    tell(f"{config.run.steps} steps")
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
