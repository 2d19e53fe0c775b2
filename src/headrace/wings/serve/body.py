"""From the bytes of a request to a JSON object, within limits."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pydantic_core
from starlette.requests import ClientDisconnect, Request

from headrace.base.net.refusal import Refusal, shown

LONG_BYTES = 2**16
"""A body longer than this is read by another thread: others must not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """What a body may be."""

    max_bytes: int
    timeout_s: float
    """Longest wait for all of it."""
    remedy: str
    """What to do about one that is too long."""


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """The object that ``request`` carries, without the fields that are ``null``: they are as if not there."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page of another origin cannot send this one unasked
        raise Refusal(
            f"the content type is {shown(kind)}, expected application/json",
            remedy="send the header 'Content-Type: application/json'",
            status=415,
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(limits.timeout_s):
            data = await _read(request, limits)
    except TimeoutError:
        raise Refusal(
            f"the body did not arrive within {limits.timeout_s:g} s", remedy="send it at once", status=408
        ) from None
    tree = await asyncio.to_thread(_parse, data) if len(data) > LONG_BYTES else _parse(data)
    return {name: value for name, value in tree.items() if value is not None}


def _parse(data: bytes) -> dict[str, Any]:
    try:
        tree = pydantic_core.from_json(data, allow_inf_nan=False)
        json.loads(data, object_pairs_hook=_refuse_twice, parse_int=str, parse_float=str)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}", remedy="send one JSON object", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise Refusal(
            f"the body is {shown(tree)}, not an object", remedy="send one JSON object: {...}", code="invalid_json"
        )
    return tree


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """The parser above takes the last of two values of one name; which one was meant nobody knows."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise Refusal(
                f"{shown(name)} is there twice in one object",
                remedy="give it once",
                param=name[:100],
                code="invalid_json",
            )
        seen.add(name)


async def _read(request: Request, limits: BodyLimits) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.max_bytes:
        raise _too_long(limits)
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > limits.max_bytes:
                raise _too_long(limits)
    except ClientDisconnect:
        raise Refusal("the client left before its body was there", remedy="send it whole") from None
    return bytes(data)


def _too_long(limits: BodyLimits) -> Refusal:
    return Refusal(
        f"the body is longer than {limits.max_bytes} bytes", remedy=limits.remedy, status=413, code="body_too_long"
    )
