"""Texts with names in braces that are filled in later."""

from __future__ import annotations

import string

from headrace.base.errors import ConfigError


def fields_of(template: str, setting: str, known: str) -> set[str]:
    """The names that a template asks for; :class:`~headrace.base.errors.ConfigError` for one that cannot be filled in.
    ``known``: those that are always there, for the error.

    >>> sorted(fields_of("{prompt} is {answer}, {{}}", "a prompt", "{prompt}"))
    ['answer', 'prompt']
    """
    try:
        fields = [(name, spec) for _, name, spec, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{setting} cannot be filled in: {error}", remedy="double braces that are meant: {{ }}"
        ) from None
    for name, spec in fields:
        if not name.isidentifier() or spec:
            raise ConfigError(
                f"{setting} asks for {name!r}, which is no plain name",
                remedy=f"write {known} or the name of a column; double braces that are meant",
            )
    return {name for name, _ in fields}
