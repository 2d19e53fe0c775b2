"""The base classes of strictly typed request bodies. Every field is used, ignored because it has no effect, or refused
by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError

from headrace.base.errors import nearest
from headrace.base.net.refusal import Refusal, excerpt

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""Largest number of stop strings in one request, and of characters in one stop string."""

B = TypeVar("B", bound="StrictBody")


class Strict(pydantic.BaseModel):
    """A base class for models of parts of a request body. Unknown fields and values of wrong types are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """The options of a stream."""

    include_usage: bool = False
    """Whether a further event at the end of the stream contains the numbers of tokens."""
    include_obfuscation: bool = False
    """Accepted for compatibility, without effect: events are not padded."""


class StrictBody(Strict):
    """A base class for models of whole request bodies, with lists of ignored and of refused fields."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that clients may send and that do not change the answer."""
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, each with the values that have no effect and are accepted."""


def read_body(kind: type[B], tree: Mapping[str, Any]) -> B:
    """Return ``tree``, the JSON of a request, as a checked record of the type ``kind``. Raises :class:`Refusal`, which
    names the first invalid field and says what is wrong with it."""
    fields = {name: value for name, value in tree.items() if name not in kind.ignored}
    for name in kind.unsupported.keys() & fields.keys():
        value = fields.pop(name)
        if not any(type(value) is type(harmless) and value == harmless for harmless in kind.unsupported[name]):
            raise Refusal(
                f"{name}={excerpt(value)} is not supported",
                remedy=f"leave {name} out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _make_refusal(kind, error.errors(include_url=False)[0]) from None


def read_stop(value: object) -> tuple[str, ...]:
    """Return the stop strings in ``value``, the field ``stop`` of a request, which is one text or a list of texts.
    Raises pydantic's error for another value."""
    texts = [value] if isinstance(value, str) else value
    if (
        isinstance(texts, list)
        and len(texts) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in texts)
    ):
        return tuple(texts)
    raise PydanticCustomError(
        "stop", f"expected a text or a list of up to {MAX_STOPS} texts, each of 1 to {MAX_STOP_LENGTH} characters"
    )


def _make_refusal(kind: type[StrictBody], detail: ErrorDetails) -> Refusal:
    """Return the refusal of a request with a field that does not validate, from ``detail``, pydantic's description of
    the error in a body of type ``kind``."""
    name = ".".join(str(part) for part in detail["loc"]) or "the body"
    value, top = detail["input"], str(detail["loc"][0]) if detail["loc"] else ""
    match detail["type"]:
        case "extra_forbidden":
            known = kind.model_fields if len(detail["loc"]) == 1 else ()
            close = nearest(str(detail["loc"][-1])[:100], known) if known else "leave it out"
            return Refusal(f"{excerpt(name)} is not a field", remedy=close, param=name[:100], code="unknown_parameter")
        case "missing":
            return Refusal(f"{name} is missing", remedy=f"give {top}", param=name, code="missing_required_parameter")
    return Refusal(
        f"{name}={excerpt(value)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}",
        remedy=f"change {top or 'the body'}",
        param=name if top else None,
    )
