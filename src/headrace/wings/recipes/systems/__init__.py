"""The recipes of known systems. Each TOML file of this folder contains one system's choice on every axis."""

from __future__ import annotations

from headrace.run.session.recipes import Recipe, read_recipes


def systems() -> dict[str, Recipe]:
    """Return the recipes of this folder by their names. An entry point names this function, so that ``--like NAME``
    finds the recipes."""
    return read_recipes(__name__)
