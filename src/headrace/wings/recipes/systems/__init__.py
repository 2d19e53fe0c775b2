"""Recipes of known systems: each TOML file of this folder says what one system chooses on every axis."""

from __future__ import annotations

from headrace.run.session.recipes import Recipe, read_recipes


def systems() -> dict[str, Recipe]:
    """Return the recipes of this folder by their names, for the entry point by which ``--like NAME`` finds them."""
    return read_recipes(__name__)
