"""A search for JSON schemas that no finite JSON can follow, because a part requires another part of its own kind.

A (part of a) schema *has an end* if some finite JSON follows it. A reference (``$ref``) has an end if the part that it
refers to has one. The references that have an end are found step by step, beginning with those whose part needs no
other reference; every function here gets the references found so far as ``ended``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
_NESTED = frozenset({"object", "array"})
_ANY = frozenset({"any"})
"""Stands for all types, where a schema names none."""
MAX_ROUNDS = 100
"""The number of passes over all references after which the search stops without a result."""


def has_end(schema: object) -> bool:
    """Return whether some finite JSON may follow ``schema``. Keywords that this search does not support are assumed to
    allow a finite value, and so is a schema whose search stops without a result.

    >>> node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    >>> has_end(node), has_end({**node, "required": ["next"]})
    (True, False)
    """
    ended: set[str] = set()
    # Backwards, since schemas usually define a part after the part that refers to it: a chain of references then takes
    # one round, and not one for each link.
    pending = list(dict.fromkeys(_references(schema)))[::-1]
    for _ in range(MAX_ROUNDS):
        remaining = [each for each in pending if not _add_if_ended(schema, each, ended)]
        if len(remaining) in (0, len(pending)):
            break
        pending = remaining[::-1]
    else:
        return True  # llguidance's own bounds apply
    return _ends(schema, ended.__contains__)


def refers(schema: object) -> bool:
    """Return whether any part of ``schema`` has a reference (``$ref``). Without references, no part can require itself.

    >>> refers({"items": {"$ref": "#"}}), refers({"items": False})
    (True, False)
    """
    return next(_references(schema), None) is not None


def _add_if_ended(schema: object, reference: str, ended: set[str]) -> bool:
    """Return whether the part of ``schema`` that ``reference`` points to has an end, given the references ``ended``
    that are known to have one. If it has, add ``reference`` to ``ended``."""
    if _ends(_target(schema, reference), ended.__contains__):
        ended.add(reference)
    return reference in ended


def _ends(schema: object, ended: Callable[[str], bool], kinds: frozenset[str] = _ANY) -> bool:
    """Return whether ``schema`` has an end, assuming that exactly the references for which ``ended`` returns true have
    one. ``kinds`` are the types that the schema around it allows; :data:`_ANY`: all. Anything but a dict (``true``, for
    example) restricts nothing and has an end."""
    if not isinstance(schema, dict):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str) and not ended(reference):
        return False
    all_of = _get(schema, "allOf", list)
    for part in (schema, *all_of):
        kinds = _kinds(part) if kinds is _ANY else kinds if _kinds(part) is _ANY else kinds & _kinds(part)
    if not all(_ends(part, ended, kinds) for part in all_of):
        return False
    for name in ("anyOf", "oneOf"):
        choices = _get(schema, name, list)
        if choices and not any(_ends(choice, ended, kinds) for choice in choices):
            return False
    return _values_end(schema, ended, kinds)


def _kinds(schema: object) -> frozenset[str]:
    """Return the types that ``schema`` names itself; :data:`_ANY` if it names none."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    listed = kind if isinstance(kind, list) else [kind]
    return frozenset(each for each in listed if isinstance(each, str)) or _ANY


def _values_end(schema: dict[str, Any], ended: Callable[[str], bool], kinds: frozenset[str]) -> bool:
    """Return whether at least one of the types ``kinds`` has a finite value under ``schema``: a plain value always has
    one. ``ended`` is as in :func:`_ends`."""
    if "enum" in schema or "const" in schema or kinds is _ANY or kinds - _NESTED:
        return True
    return ("object" in kinds and _object_ends(schema, ended)) or ("array" in kinds and _array_ends(schema, ended))


def _object_ends(schema: dict[str, Any], ended: Callable[[str], bool]) -> bool:
    """Return whether a finite object follows ``schema``: all its required properties have an end, and at least
    ``minProperties`` of its properties have one."""
    required = [name for name in _get(schema, "required", list) if isinstance(name, str)]
    if not all(_ends(part, ended) for name in required for part in _find_parts(schema, name)):
        return False
    others = (_get(schema, "patternProperties", dict).values(), [schema.get("additionalProperties")])
    if any(_ends(part, ended) for parts in others for part in parts):
        return True  # there are always enough names for these
    named = _get(schema, "properties", dict)
    return sum(_ends(part, ended) for part in named.values()) >= _get(schema, "minProperties", int)


def _array_ends(schema: dict[str, Any], ended: Callable[[str], bool]) -> bool:
    """Return whether a finite array follows ``schema``: its first ``minItems`` items have an end."""
    first, rest, least = _get(schema, "prefixItems", list), schema.get("items"), _get(schema, "minItems", int)
    return all(_ends(part, ended) for part in first[:least]) and (len(first) >= least or _ends(rest, ended))


def _find_parts(schema: dict[str, Any], name: str) -> list[object]:
    """Return the parts of ``schema`` that the value of the property ``name`` must follow."""
    parts = [part for each, part in _get(schema, "properties", dict).items() if each == name]
    for pattern, part in _get(schema, "patternProperties", dict).items():
        with suppress(re.error):  # a pattern in another dialect is ignored
            parts += [part] if re.search(pattern, name) else []
    return parts or [schema.get("additionalProperties")]


def _get(schema: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the value of the keyword ``name`` if it has the type ``kind``; else an empty value of this type, or 0."""
    found = schema.get(name)
    return found if isinstance(found, kind) else kind()


def _references(schema: object) -> Iterator[str]:
    """Yield the text of every reference (``$ref``) at any depth of ``schema``, such as ``#/$defs/node``."""
    remaining = [schema]
    while remaining:
        part = remaining.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str):
                yield reference
            remaining += part.values()
        elif isinstance(part, list):
            remaining += part


def _target(schema: object, reference: str) -> object:
    """Return the part of ``schema`` that ``reference`` points to, such as ``#/$defs/node``; ``None`` if it points
    outside ``schema`` or to no part of it."""
    target = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        step = name.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target if reference.startswith("#") else None
