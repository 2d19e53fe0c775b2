"""What a setting may be, in words."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

_KINDS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def is_choice(form: Any) -> bool:
    """Whether a setting of this annotation takes one of several forms, none of them a section."""
    forms = [part for part in get_args(form) if part is not types.NoneType]
    return get_origin(form) in (Union, types.UnionType) and len(forms) > 1 and not any(map(_is_section, forms))


def allowed(form: Any) -> str:
    """What a setting of this annotation may be.

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
    """The limits of a number that a note beside its annotation gives."""
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
