"""The names that a text template contains in braces."""

from __future__ import annotations

import string

from headrace.base.errors import ConfigError


def template_fields(template: str, setting: str, known: str) -> set[str]:
    """Return the names that stand in braces in ``template``. Raises :class:`~headrace.base.errors.ConfigError` for a
    name that is not a plain identifier. Two arguments are for the error message only: ``setting`` says whose template
    it is, and ``known`` lists the names that are always available.

    >>> sorted(template_fields("{prompt} is {answer}, {{}}", "a prompt", "{prompt}"))
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
                f"{setting} asks for {name!r}, which is not a plain name",
                remedy=f"write {known} or the name of a column; double braces that are meant",
            )
    return {name for name, _ in fields}
