"""Names of formulas: the ``kind`` of each row of a union of settings."""

from __future__ import annotations

from typing import Any, get_args

from headrace.base.config import Section
from headrace.base.errors import ConfigError, nearest


def rows(union: Any) -> dict[str, type[Any]]:
    """The settings classes of a union by their kind.

    >>> from headrace.algo.reductions import AnyReduction
    >>> sorted(rows(AnyReduction))[:2]
    ['constant', 'prompt_mean']
    """
    kinds: tuple[type[Section], ...] = get_args(union)
    return {str(kind.model_fields["kind"].default): kind for kind in kinds}


def find(union: Any, what: str, name: object) -> type[Any]:
    """The settings class called ``name``; :class:`ConfigError` offers the nearest."""
    known = rows(union)
    if not isinstance(name, str):
        raise ConfigError(f"{what} {name!r} is no name", remedy=f"name one of: {', '.join(sorted(known))}")
    if name not in known:
        raise ConfigError(f"{what} {name!r} does not exist", remedy=nearest(name, known))
    return known[name]


def named(name: str) -> dict[str, Any]:
    """The table that a name alone stands for; ``file.py:function`` is a custom piece.

    >>> named("gspo"), named("my_losses.py:my_loss")
    ({'kind': 'gspo'}, {'kind': 'custom', 'ref': 'my_losses.py:my_loss'})
    """
    return {"kind": "custom", "ref": name} if ".py:" in name else {"kind": name}


def options_of(kind: type[Section]) -> set[str]:
    """The options that a settings class has."""
    return set(kind.model_fields) - {"kind"}
