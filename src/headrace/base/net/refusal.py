"""HTTP errors for refused requests, in the JSON format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.base.errors import EngineFull, HeadraceError, RequestError, SequenceFailed

RETRY_AFTER_S = 1
"""The number of seconds after which a client of a full server should try again."""

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
"""The headers of a response that is a stream of events."""
_TYPES = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(HeadraceError):
    """An error that becomes the response to one HTTP request. ``status`` is the HTTP status; ``param`` is the name of
    the invalid field of the request, or ``None``; ``code`` is a machine-readable name of the problem."""

    def __init__(
        self, problem: str, *, remedy: str, status: int = 400, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        """Store the problem and the ``remedy``, ``status``, the HTTP status, ``param``, the invalid field of the
        request or ``None``, and ``code``, the kind of problem, as in OpenAI's API."""
        super().__init__(problem, remedy=remedy)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response, in the format of OpenAI's API."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = f"{self.problem}; {self.remedy}"
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, body: Mapping[str, Any] | None = None) -> Response:
        """Return the error as an HTTP response. ``body`` replaces the JSON body of :meth:`body` if it is not ``None``.
        A client without the token (status 401) receives no body. For status 429 and 503 the response says when the
        client may try again."""
        if self.status == 401:
            return Response(status_code=401, headers={"www-authenticate": "Bearer"})
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        return JSONResponse(self.body() if body is None else body, status_code=self.status, headers=headers)


async def respond_refused(_: Request, error: Exception) -> Response:
    """Return the HTTP response for a :class:`Refusal` that a route has raised."""
    assert isinstance(error, Refusal)
    return error.response()


def refuse_unknown(request: Request, error: Exception, known: str) -> Refusal:
    """Return the refusal of a request for a path or a method that is not served, for which ``error`` was raised;
    ``known`` lists the paths that are served."""
    assert isinstance(error, HTTPException)
    path, remedy = excerpt(request.url.path), f"known: {known}"
    if error.status_code == 405:
        return Refusal(f"{request.method} is not for {path}", remedy=remedy, status=405, code="method_not_allowed")
    return Refusal(f"there is nothing at {path}", remedy=remedy, status=error.status_code, code="not_found")


def refuse_request(error: RequestError) -> Refusal:
    """Return the refusal of a request that an engine cannot serve: status 429 if its queue is full, 500 if the sequence
    failed in the engine, and otherwise 400."""
    if isinstance(error, EngineFull):
        return Refusal(error.problem, remedy=error.remedy, status=429, code="engine_full")
    if isinstance(error, SequenceFailed):
        return Refusal(error.problem, remedy=error.remedy, status=500, code="sequence_failed")
    return Refusal(error.problem, remedy=error.remedy)


def excerpt(value: object, limit: int = 60) -> str:
    """Return ``value``, which a client has sent, as printable ASCII of at most ``limit`` characters, for an error
    message."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
