"""Names of formulas: the ``kind`` of each row of a union of settings."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import get_args

from headrace.config import Section
from headrace.errors import ConfigError, nearest


def rows(union: UnionType | type[Section]) -> dict[str, type[Section]]:
    """The settings classes of a union by their kind.

    >>> from headrace.algo.reductions import AnyReduction
    >>> sorted(rows(AnyReduction))[:2]
    ['constant', 'prompt_mean']
    """
    kinds: Sequence[type[Section]] = get_args(union) or (union,)  # type: ignore[assignment]
    return {str(kind.model_fields["kind"].default): kind for kind in kinds}


def find(union: UnionType | type[Section], what: str, name: str) -> type[Section]:
    """The settings class called ``name``; :class:`ConfigError` offers the nearest."""
    known = rows(union)
    if name not in known:
        raise ConfigError(f"{what} {name!r} does not exist", remedy=nearest(name, known))
    return known[name]


def options_of(kind: type[Section]) -> set[str]:
    """The options that a settings class has."""
    return set(kind.model_fields) - {"kind"}
