"""Converts docstrings to Markdown; also an extension of griffe, which renders the page of Python names."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?([^`]+)`")


def as_markdown(docstring: str) -> str:
    """Return the docstring with cross-references as code and examples as code blocks.

    >>> as_markdown("See :class:`~headrace.base.errors.ConfigError`.")
    'See `ConfigError`.'
    >>> as_markdown(">>> 1 + 1\\n2")
    '```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    text = ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2]}`", docstring)
    parts = re.split(r"\n\s*\n", text)
    return "\n\n".join(f"```pycon\n{part}\n```" if part.lstrip().startswith(">>>") else part for part in parts)


class Markdown(griffe.Extension):
    """An extension that converts every docstring to Markdown before it is rendered."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Convert the docstring of one object; called by griffe."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
