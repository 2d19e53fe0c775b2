"""Complete recipes by name: advantage, loss, correction and reduction that belong together."""

from __future__ import annotations

from typing import Any

from headrace.config import merge
from headrace.errors import ConfigError, nearest

Tree = dict[str, Any]

BUNDLES: dict[str, Tree] = {
    "grpo": {"advantage": {"kind": "grpo", "std": "ddof1"}, "loss": {"kind": "grpo"}},
    "dapo": {"advantage": {"kind": "grpo", "std": "ddof1"}, "loss": {"kind": "dapo"}},
}
"""What a bundle leaves out is what its loss decides: the reduction of its paper, and ``tis`` unless it anchors to μ."""


def expand(tree: Tree) -> Tree:
    """``tree`` with names as tables and its bundle laid under it; a table of another kind replaces the bundle's.

    >>> expand({"bundle": "dapo", "loss": {"clip_high": 0.3}})["loss"]
    {'kind': 'dapo', 'clip_high': 0.3}
    """
    tree = {key: _as_table(key, value) for key, value in tree.items()}
    name = tree.get("bundle")
    if name is None:
        return tree
    if name not in BUNDLES:
        raise ConfigError(f"algo.bundle={name!r} does not exist", remedy=nearest(str(name), BUNDLES))
    base = {key: value for key, value in BUNDLES[name].items() if not _other_kind(value, tree.get(key))}
    return merge(base, tree)


def _as_table(key: str, value: Any) -> Any:
    """A name as its table; corrections as a list of tables."""
    if key == "correction":
        if isinstance(value, str | dict):
            value = [] if value == "none" else [value]
        return tuple({"kind": part} if isinstance(part, str) else part for part in value) if _listed(value) else value
    if key in ("loss", "advantage", "reduction") and isinstance(value, str):
        return {"kind": value}
    return value


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _other_kind(ours: Any, given: Any) -> bool:
    return isinstance(ours, dict) and isinstance(given, dict) and given.get("kind", ours["kind"]) != ours["kind"]
