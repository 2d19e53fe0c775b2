"""The names in braces that a text template contains, such as ``{prompt}``."""

from __future__ import annotations

import string

from headrace.base.errors import ConfigError


def template_fields(template: str, setting: str, known: str) -> set[str]:
    """Return the names in braces that ``template`` contains. Raises :class:`~headrace.base.errors.ConfigError` for a
    name that is not a plain identifier. ``setting``, which names the template, and ``known``, which lists the names
    that are always available, are used in the error message only.

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
