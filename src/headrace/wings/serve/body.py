"""The reading of a request's body as a JSON object, within limits, and the cancellation of work when the client
disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic_core
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.tasks import task_group

LONG_BYTES = 2**16
"""Size in bytes above which a body is parsed by another thread, so that the event loop stays free for other
requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """The limits of the body of one request, in size and time."""

    max_bytes: int
    """Largest size of a body, in bytes."""
    timeout_s: float
    """Longest wait for the whole body, in seconds."""
    remedy: str
    """Advice for the sender of a body that is too long."""


async def read_object(request: Request, limits: BodyLimits) -> dict[str, Any]:
    """Read the body of ``request`` within ``limits``, and return its JSON object, without fields that are ``null``.
    Raises :class:`Refusal` for a wrong content type, a body that is too long or arrives too late, and invalid JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # browsers send this type across origins only after a CORS check
        raise Refusal(
            f"the content type is {excerpt(kind)}, expected application/json",
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
    """Parse the bytes of a body as a JSON object. Raises :class:`Refusal` for a body that is not a JSON object, and for
    a body in which an object has the same name twice."""
    # from_json keeps the last of two values with one name; the second pass refuses such a body
    try:
        tree = pydantic_core.from_json(data, allow_inf_nan=False)
        json.loads(data, object_pairs_hook=_refuse_twice, parse_int=str, parse_float=str)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}", remedy="send one JSON object", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise Refusal(
            f"the body is {excerpt(tree)}, not an object", remedy="send one JSON object: {...}", code="invalid_json"
        )
    return tree


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Raise :class:`Refusal` if a name occurs twice among the members of a JSON object, since it is unclear which value
    is meant. The JSON decoder calls this function for every object."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise Refusal(
                f"{excerpt(name)} is there twice in one object",
                remedy="give it once",
                param=name[:100],
                code="invalid_json",
            )
        seen.add(name)


async def _read(request: Request, limits: BodyLimits) -> bytes:
    """Return the bytes of the body of a request. Raises :class:`Refusal` as soon as the body is longer than the limit,
    and if the client disconnects before the end of the body."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > limits.max_bytes:
        raise _make_too_long_refusal(limits)
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > limits.max_bytes:
                raise _make_too_long_refusal(limits)
    except ClientDisconnect:
        raise Refusal("the client left before its body was there", remedy="send it whole") from None
    return bytes(data)


def _make_too_long_refusal(limits: BodyLimits) -> Refusal:
    """Return the refusal, with status 413, of a body that is too long."""
    return Refusal(
        f"the body is longer than {limits.max_bytes} bytes", remedy=limits.remedy, status=413, code="body_too_long"
    )


A = TypeVar("A")
Receive = Callable[[], Awaitable[Message]]


class ClientGone(Exception):
    """The error that ends the work for a client that has disconnected."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, A]) -> A:
    """Run ``work`` while the client is connected, and return its result or raise its error. ``receive`` is ASGI's
    function that reports the disconnection of the client. When it does, ``work`` is cancelled, and :class:`ClientGone`
    is raised."""
    is_gone = False

    async def watch() -> None:
        """Cancel the work when the client closes the connection."""
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        working.cancel()

    async with task_group() as group:
        working = group.create_task(work)
        watching = group.create_task(watch())
        working.add_done_callback(lambda _: watching.cancel())
    if working.cancelled():
        raise ClientGone if is_gone else asyncio.CancelledError
    return working.result()
