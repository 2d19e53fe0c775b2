"""JSON schemas that no finite JSON follows, because a part requires another of its own kind.

A reference has an end if what it refers to has one without it: the references that have one are found step by step,
beginning with those that need no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_NESTED = frozenset({"object", "array"})
MAX_ROUNDS = 100
"""Number of rounds over all references after which the search is given up; each direction of a chain takes one."""


def has_end(schema: object) -> bool:
    """Return whether some finite JSON may follow ``schema``. Keywords that this does not know count as fulfilled.

    >>> node = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    >>> has_end(node), has_end({**node, "required": ["next"]})
    (True, False)
    """
    ended: set[str] = set()
    # Backwards, since schemas usually define a part after the part that refers to it: a chain of references then takes
    # one round, and not one for each link.
    waiting = list(dict.fromkeys(_references(schema)))[::-1]
    for _ in range(MAX_ROUNDS):
        left = [each for each in waiting if not _found(schema, each, ended)]
        if len(left) in (0, len(waiting)):
            break
        waiting = left[::-1]
    else:
        return True  # llguidance's own bounds apply
    return _ends(schema, ended.__contains__)


def _found(schema: object, reference: str, ended: set[str]) -> bool:
    """Add a reference to those that have an end, if it has one; return whether it has."""
    if _ends(_target(schema, reference), ended.__contains__):
        ended.add(reference)
    return reference in ended


def _ends(schema: object, ended: Callable[[str], bool]) -> bool:
    """Return whether ``schema`` has an end if exactly the references that are ``ended`` have one."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and not ended(reference):
        return False
    if not all(_ends(part, ended) for part in _listed(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        choices = _listed(schema, name)
        if choices and not any(_ends(choice, ended) for choice in choices):
            return False
    return _values_end(schema, ended)


def _values_end(schema: dict[str, Any], ended: Callable[[str], bool]) -> bool:
    """Return whether a value of one of the schema's types has an end."""
    kind = schema.get("type")
    listed = kind if isinstance(kind, list) else [kind]
    kinds = {each for each in listed if isinstance(each, str)}
    if "enum" in schema or "const" in schema or not kinds or kinds - _NESTED:
        return True
    properties = schema.get("properties")
    named = properties if isinstance(properties, dict) else {}
    required = [named.get(name) for name in _listed(schema, "required") if isinstance(name, str)]
    if "object" in kinds and all(_ends(part, ended) for part in required):
        return True
    return "array" in kinds and (not schema.get("minItems") or _ends(schema.get("items"), ended))


def _listed(schema: dict[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _references(schema: object) -> Iterator[str]:
    """Yield every reference within ``schema``."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str):
                yield reference
            left += part.values()
        elif isinstance(part, list):
            left += part


def _target(schema: object, reference: str) -> object:
    """Return what a reference within ``schema`` refers to; ``None`` for one that leads elsewhere."""
    target = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        step = name.replace("~1", "/").replace("~0", "~")
        target = target.get(step) if isinstance(target, dict) else None
    return target if reference.startswith("#") else None
