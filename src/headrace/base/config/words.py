"""Descriptions, in words, of the values that a setting accepts."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from headrace.base.config.kinds import NameOf

_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def is_choice(form: Any) -> bool:
    """Return whether a setting with this annotation accepts several alternatives of which none is a section."""
    forms = [part for part in get_args(form) if part is not types.NoneType]
    return get_origin(form) in (Union, types.UnionType) and len(forms) > 1 and not any(map(_is_section, forms))


def allowed(form: Any) -> str:
    """Return a description of the values that a setting with this annotation accepts.

    >>> allowed(pydantic.NonNegativeInt | Literal["auto"] | None)
    "an integer >= 0 or 'auto'"
    >>> allowed(list[str])
    'a list, each text'
    """
    origin, parts = get_origin(form), get_args(form)
    if origin in (Union, types.UnionType):
        return " or ".join(allowed(part) for part in parts if part is not types.NoneType)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin is Annotated:
        named = next((note for note in parts[1:] if isinstance(note, NameOf)), None)
        if named is not None:
            return " or ".join(map(repr, named.names()))
        bounds = [bound for note in parts[1:] for bound in _bounds(note)]
        return f"{allowed(parts[0])} {' and '.join(bounds)}".rstrip()
    if origin in (list, tuple):
        return f"a list, each {allowed(parts[0])}"
    return _KINDS.get(form, str(form))


def _is_section(form: Any) -> bool:
    if get_origin(form) is Annotated:
        return _is_section(get_args(form)[0])
    return isinstance(form, type) and issubclass(form, pydantic.BaseModel)


def _bounds(note: Any) -> list[str]:
    """Return the limits of a number that an annotation's metadata gives, such as ``>= 0``."""
    match note:
        case FieldInfo():
            return [bound for each in note.metadata for bound in _bounds(each)]
        case annotated_types.Ge(ge=limit):
            return [f">= {limit}"]
        case annotated_types.Gt(gt=limit):
            return [f"> {limit}"]
        case annotated_types.Le(le=limit):
            return [f"<= {limit}"]
        case annotated_types.Lt(lt=limit):
            return [f"< {limit}"]
    return []
