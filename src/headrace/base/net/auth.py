"""Authentication of HTTP requests by a bearer token.

A server with a token answers any request without the token with status 401. A server without a token listens on this
machine only, and a request must also name this machine as its host. This refuses requests of a web page that resolves
its own host name to this machine (DNS rebinding).
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.config.addresses import is_loopback, parse_host
from headrace.base.errors import ConfigError
from headrace.base.net.connection import mark_authorized
from headrace.base.net.refusal import Refusal, excerpt


class TokenAuth:
    """An ASGI application that forwards authenticated HTTP requests to another application and refuses all others."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        """Protect ``app`` by ``token``. With an empty ``token``, a request needs no token but must be addressed to this
        machine."""
        self._app = app
        self._token = token.encode(errors="surrogateescape")
        """The token as bytes, since a token need not be valid UTF-8."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse an HTTP request without the token; mark any other request as authorized and forward it."""
        if scope["type"] == "http":
            refusal = self._refusal(Headers(scope=scope))
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
            mark_authorized(scope)
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Refusal | None:
        """Return the error with which a request with these headers is refused; ``None`` if the request is accepted."""
        if not self._token:
            host = headers.get("host", "")
            if is_loopback(parse_host(host)):
                return None
            return Refusal(
                f"the request is addressed to {excerpt(host)}, and without a token only this machine may call",
                remedy="call 127.0.0.1 or localhost, or start the server with a token",
                status=403,
                code="host_not_allowed",
            )
        header = headers.get("authorization", "").encode("latin-1")  # the bytes as sent: a token may be any text
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


def refuse_unprotected_host(host: str, token: str) -> None:
    """Raise :class:`~headrace.base.errors.ConfigError` if ``token`` is empty and other machines can connect to
    ``host``, the address at which a server is to listen."""
    if not token and not is_loopback(host):
        raise ConfigError(
            f"serve.host={host!r} can be reached from other machines, and there is no token",
            remedy="give --token-file FILE or set HEADRACE_SERVE_TOKEN, or bind to 127.0.0.1",
        )
