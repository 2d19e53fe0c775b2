"""The base class of every section of a run file. A section is the record of one table of settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar

import pydantic


class Section(pydantic.BaseModel):
    """A frozen record of settings that refuses unknown keys. Each component declares its own section, beside its
    class."""

    # not use_attribute_docstrings: it parses the source of every section in every process that imports one
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    former_keys: ClassVar[Mapping[str, str]] = {}
    """Renamed settings: the former dotted name of each, mapped to the present name, for error messages. Only the
    section of a whole run file has any."""


def descriptions(section_class: type[Section]) -> dict[str, str]:
    """Return the docstring of each setting of the section ``section_class``, inherited settings included, by the
    setting's name. Docstrings are read from the source code; a setting without a docstring is omitted."""
    found: dict[str, str] = {}
    for each in reversed(section_class.__mro__):
        if issubclass(each, Section) and each is not Section:
            found |= _attribute_docstrings(each)
    return {name: text for name, text in found.items() if name in section_class.model_fields}


def _attribute_docstrings(section_class: type[Section]) -> dict[str, str]:
    """Return the docstrings of the fields of a section, by name, from its source."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section_class))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
