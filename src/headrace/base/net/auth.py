"""Who may call.

With a token, every request needs it, whatever its path, and without it hears nothing but 401. Where there is none the
server listens on this machine only, and a request must also be addressed to this machine by name: a web page that
points a name of its own here is turned away.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.config.addresses import host_of, is_loopback
from headrace.base.errors import ConfigError
from headrace.base.net.connection import mark_entitled
from headrace.base.net.refusal import Refusal, shown


class TokenAuth:
    """Lets requests through to ``app``, or answers them itself."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token.encode(errors="surrogateescape")  # the bytes that were given, whatever they mean

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
            mark_entitled(scope)
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Refusal | None:
        if not self._token:
            host = headers.get("host", "")
            if is_loopback(host_of(host)):
                return None
            return Refusal(
                f"the request is addressed to {shown(host)}, and without a token only this machine may call",
                remedy="call 127.0.0.1 or localhost, or start the server with a token",
                status=403,
                code="host_not_allowed",
            )
        header = headers.get("authorization", "").encode("latin-1")  # its bytes: a token may be any text
        kind, _, given = header.partition(b" ")
        is_right = hmac.compare_digest(given.strip(), self._token)
        if kind.lower() == b"bearer" and is_right:
            return None
        return Refusal(
            "the request does not carry the token",
            remedy="send the header 'Authorization: Bearer TOKEN' (api_key of the OpenAI client)",
            status=401,
            code="invalid_api_key",
        )


def refuse_open_door(host: str, token: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if anybody on the network could call."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"serve.host={host!r} can be reached from other machines, and there is no token",
            remedy="give --token-file FILE or set HEADRACE_SERVE_TOKEN, or bind to 127.0.0.1",
        )
