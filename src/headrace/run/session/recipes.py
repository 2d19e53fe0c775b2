"""Recipes: settings that make a run behave like one known system. A recipe is one TOML file.

A package adds a folder of recipes with one function and one entry point of the group ``headrace.recipes``::

    def recipes():
        return read_recipes("my_package.recipes")

>>> recipe("pipelinerl").axes["interrupt"]
'in flight, between forward passes'
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headrace.base.errors import ConfigError, nearest
from headrace.base.plugins import Registry

log = logging.getLogger("headrace")

AXES = (*("orchestration", "buffer", "weight_sync", "interrupt", "staleness"), *("partial_rollouts", "lora", "learner"))
"""The design decisions that each recipe describes, in the order in which they are shown."""
DECIDED = {
    "flow": frozenset({"policy", "max_age", "age_tuning", "lead", "order", "capacity"}),
    "sync": frozenset({"transport", "codec", "interrupt", "host", "directory"}),
    "algo": frozenset({"loss", "correction", "old", "allow_uncorrected"}),
}
"""The settings, by section, that a recipe may set. All other settings depend on the task: model, data, sizes,
optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The design decisions of one published system for RL of language models, and the settings with which a run of
    Headrace behaves like it (``--like NAME``)."""

    name: str
    """The name of the recipe, which is the name of its file without ``.toml``."""
    system: str
    """The name of the original system."""
    says: str
    """A description in one sentence."""
    axes: Mapping[str, str]
    """The decision of the original system on each of :data:`AXES`, in words."""
    differs: str
    """The differences between a run with these settings and the original system."""
    settings: Mapping[str, Any]
    """The settings, as part of a run file, with which a run behaves like the system."""
    toml: str
    """The settings of the recipe as TOML text."""


def _describe_problem(registered: Any) -> str | None:
    """Return the end of a sentence that says why ``registered``, an object that a package registered as a collection of
    recipes, cannot be used; ``None`` if it is a function."""
    return None if callable(registered) else "cannot be called"


COLLECTIONS = Registry[Callable[[], Mapping[str, Recipe]]](
    group="headrace.recipes", setting="the collection of recipes", check=_describe_problem
)
"""The registry of the functions that return recipes by their names."""


def read_recipes(package: str) -> dict[str, Recipe]:
    """Return the recipes in the folder of the Python package ``package``, by name. Each file ``NAME.toml`` is a
    recipe."""
    all_recipes = [
        _parse_recipe(entry.name.removesuffix(".toml"), entry.read_text(encoding="utf-8"))
        for entry in files(package).iterdir()
        if entry.name.endswith(".toml")
    ]
    return {each.name: each for each in all_recipes}


@cache
def recipes() -> Mapping[str, Recipe]:
    """Return all recipes by name, the default first. A collection that cannot be loaded is skipped, with a warning that
    names its package."""
    by_name: dict[str, Recipe] = {}
    for collection in COLLECTIONS:
        try:
            by_name = {**COLLECTIONS.load(collection)(), **by_name}
        except ConfigError as error:
            log.warning("%s; %s", error.problem, error.remedy)
    return {each.name: each for each in sorted(by_name.values(), key=lambda each: (each.name != "default", each.name))}


def recipe(name: str) -> Recipe:
    """Return the recipe ``name``. Raises :class:`~headrace.base.errors.ConfigError` for an unknown name."""
    if name not in recipes():
        raise ConfigError(f"there is no recipe {name!r}", remedy=f"{nearest(name, recipes())}; see: headrace recipes")
    return recipes()[name]


def left_open(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run file ``tree`` without the settings that recipes may set (:data:`DECIDED`).

    >>> left_open({"run": {"steps": 3}, "flow": {"group_size": 8, "max_age": 2}})
    {'run': {'steps': 3}, 'flow': {'group_size': 8}}
    """
    return {
        section: {key: value for key, value in table.items() if key not in DECIDED.get(section, ())}
        if isinstance(table, Mapping)
        else table
        for section, table in tree.items()
    }


def _parse_recipe(name: str, text: str) -> Recipe:
    """Return the recipe ``name`` from ``text``, the content of its file: a table ``[recipe]`` of descriptions, an empty
    line, and the settings in the form of a run file."""
    head, _, toml = text.partition("\n\n")
    words = tomllib.loads(head)["recipe"]
    assert set(words) == {"system", "says", "differs", *AXES}, f"{name}.toml: {sorted(words)}"
    return Recipe(
        name=name,
        system=words["system"],
        says=words["says"],
        axes={axis: words[axis] for axis in AXES},
        differs=words["differs"],
        settings=tomllib.loads(toml),
        toml=toml,
    )
