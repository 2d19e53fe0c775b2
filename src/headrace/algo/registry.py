"""Functions that find formulas by name: advantages, losses, reductions and corrections. The name of a formula is the
``kind`` of its settings class. The classes of each sort of formula are the members of a union, or of a registry."""

from __future__ import annotations

from typing import Any, get_args

from headrace.base.config import Section
from headrace.base.config.kinds import Kinds
from headrace.base.errors import ConfigError, nearest


def classes_by_kind(union: Any) -> dict[str, type[Any]]:
    """Return the settings classes that are the members of ``union``, by their ``kind``.

    >>> from headrace.algo.reductions import AnyReduction
    >>> sorted(classes_by_kind(AnyReduction))[:2]
    ['constant', 'prompt_mean']
    """
    kinds: tuple[type[Section], ...] = get_args(union)
    return {str(kind.model_fields["kind"].default): kind for kind in kinds}


def find(kinds: Kinds, noun: str, name: object) -> type[Any]:
    """Return the settings class of ``kinds`` whose ``kind`` is ``name``. The class belongs to Headrace or to an
    installed package.

    ``noun`` is the noun for a formula of these kinds, such as ``loss``, with which error messages begin. Raises
    :class:`ConfigError`, which suggests the nearest name, for an unknown name.
    """
    known = kinds.registry.names()
    if not isinstance(name, str):
        raise ConfigError(f"{noun} {name!r} is not a name", remedy=f"name one of: {', '.join(sorted(known))}")
    if name not in known:
        raise ConfigError(f"{noun} {name!r} does not exist", remedy=nearest(name, known))
    return kinds.find(name)


def settings_table(name: str) -> dict[str, Any]:
    """Return the table of settings for the plain name of a formula; ``file.py:function`` is a custom formula.

    >>> settings_table("gspo"), settings_table("my_losses.py:my_loss")
    ({'kind': 'gspo'}, {'kind': 'custom', 'ref': 'my_losses.py:my_loss'})
    """
    return {"kind": "custom", "ref": name} if ".py:" in name else {"kind": name}


def get_option_names(section_class: type[Section]) -> set[str]:
    """Return the names of the options of a formula: the fields of its settings class ``section_class`` except
    ``kind``."""
    return set(section_class.model_fields) - {"kind"}
