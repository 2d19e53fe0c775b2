"""The names of formulas, which are the ``kind`` of each class in a union of settings."""

from __future__ import annotations

from typing import Any, get_args

from headrace.base.config import Section
from headrace.base.config.kinds import Kinds
from headrace.base.errors import ConfigError, nearest


def rows(union: Any) -> dict[str, type[Any]]:
    """Return the settings classes of a union by their kind.

    >>> from headrace.algo.reductions import AnyReduction
    >>> sorted(rows(AnyReduction))[:2]
    ['constant', 'prompt_mean']
    """
    kinds: tuple[type[Section], ...] = get_args(union)
    return {str(kind.model_fields["kind"].default): kind for kind in kinds}


def find(kinds: Kinds, what: str, name: object) -> type[Any]:
    """Return the settings class called ``name``. Raises :class:`ConfigError` that suggests the nearest name."""
    known = kinds.registry.names()
    if not isinstance(name, str):
        raise ConfigError(f"{what} {name!r} is not a name", remedy=f"name one of: {', '.join(sorted(known))}")
    if name not in known:
        raise ConfigError(f"{what} {name!r} does not exist", remedy=nearest(name, known))
    return kinds.find(name)


def named(name: str) -> dict[str, Any]:
    """Return the table for a name alone; ``file.py:function`` is a custom formula.

    >>> named("gspo"), named("my_losses.py:my_loss")
    ({'kind': 'gspo'}, {'kind': 'custom', 'ref': 'my_losses.py:my_loss'})
    """
    return {"kind": "custom", "ref": name} if ".py:" in name else {"kind": name}


def options_of(kind: type[Section]) -> set[str]:
    """Return the names of the options of a settings class."""
    return set(kind.model_fields) - {"kind"}
