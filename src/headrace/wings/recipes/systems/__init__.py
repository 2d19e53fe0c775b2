"""Recipes: each is what one system chooses on every axis, made of this library's own parts. A file is a recipe.

>>> recipe("pipelinerl").axes["interrupt"]
'in flight, between forward passes'
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headrace.base.errors import ConfigError, nearest

AXES = (
    *("orchestration", "buffer", "weight_sync", "interrupt", "staleness"),
    *("partial_rollouts", "lora", "learner"),
)
"""In the order in which they are told."""
DECIDED = {
    "flow": frozenset({"policy", "max_age", "age_tuning", "lead", "order", "capacity"}),
    "sync": frozenset({"transport", "codec", "interrupt", "host", "directory"}),
    "algo": frozenset({"loss", "correction", "old", "allow_uncorrected"}),
}
"""The settings, by section, that make a run one system rather than another. The rest is the task's: model, data, sizes,
optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One system as a point of the space."""

    name: str
    system: str
    """What its makers call it."""
    says: str
    """What it is, in a sentence."""
    axes: Mapping[str, str]
    """What the system itself does on each of :data:`AXES`."""
    differs: str
    """Where a run with these settings does something else."""
    settings: Mapping[str, Any]
    """The part of a run file that makes a run behave like it."""
    toml: str
    """The same as it is written there."""


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them by name, the default first."""
    found = [
        _read(entry.name.removesuffix(".toml"), entry.read_text(encoding="utf-8"))
        for entry in files(__name__).iterdir()
        if entry.name.endswith(".toml")
    ]
    return {each.name: each for each in sorted(found, key=lambda each: (each.name != "default", each.name))}


def recipe(name: str) -> Recipe:
    """The one of that name; :class:`~headrace.base.errors.ConfigError` where there is none."""
    if name not in recipes():
        raise ConfigError(f"there is no recipe {name!r}", remedy=f"{nearest(name, recipes())}; see: headrace recipes")
    return recipes()[name]


def left_open(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A run file without what recipes decide, so that one may decide it.

    >>> left_open({"run": {"steps": 3}, "flow": {"group_size": 8, "max_age": 2}})
    {'run': {'steps': 3}, 'flow': {'group_size': 8}}
    """
    return {
        section: {key: value for key, value in table.items() if key not in DECIDED.get(section, ())}
        if isinstance(table, Mapping)
        else table
        for section, table in tree.items()
    }


def _read(name: str, text: str) -> Recipe:
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
