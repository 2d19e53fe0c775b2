"""Bodies of requests, strictly typed: every field is used, ignored if it changes nothing, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError

from headrace.base.errors import nearest
from headrace.base.net.refusal import Refusal, shown

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""Stop strings of one request, and characters of one."""

B = TypeVar("B", bound="StrictBody")


class Strict(pydantic.BaseModel):
    """A part of a body."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StrictBody(Strict):
    """A whole body, and what becomes of the fields of its protocol that it does not hold."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """What clients may send and what would change no answer of ours."""
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """What cannot be done, with the values that ask for nothing."""


def read_body(kind: type[B], tree: Mapping[str, Any]) -> B:
    """``tree`` as a ``kind``; :class:`Refusal` says what is wrong with the first field that is."""
    fields = {name: value for name, value in tree.items() if name not in kind.ignored}
    for name in kind.unsupported.keys() & fields.keys():
        value = fields.pop(name)
        if not any(type(value) is type(harmless) and value == harmless for harmless in kind.unsupported[name]):
            raise Refusal(
                f"{name}={shown(value)} is not supported",
                remedy=f"leave {name} out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return kind.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _refusal(kind, error.errors(include_url=False)[0]) from None


def read_stop(value: object) -> tuple[str, ...]:
    """One stop string, or several."""
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


def _refusal(kind: type[StrictBody], detail: ErrorDetails) -> Refusal:
    name = ".".join(str(part) for part in detail["loc"]) or "the body"
    value, top = detail["input"], str(detail["loc"][0]) if detail["loc"] else ""
    match detail["type"]:
        case "extra_forbidden":
            known = kind.model_fields if len(detail["loc"]) == 1 else ()
            close = nearest(str(detail["loc"][-1])[:100], known) if known else "leave it out"
            return Refusal(f"{shown(name)} is not a field", remedy=close, param=name[:100], code="unknown_parameter")
        case "missing":
            return Refusal(f"{name} is missing", remedy=f"give {top}", param=name, code="missing_required_parameter")
    return Refusal(
        f"{name}={shown(value)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}", remedy=f"change {top}", param=name
    )
