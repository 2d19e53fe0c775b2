"""The authentication of the dashboard, and the security headers of its responses.

The URL that ``headrace view`` prints contains the token. The first response replaces it by a cookie that no script can
read. A request with neither the token nor the cookie is answered with status 401, and at ``/`` with a form for the
token.
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.base.net.connection import mark_authorized

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: only scripts and styles from the server's own files, no inline code, nothing from other
hosts."""
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_BEARER_REQUIRED = {"www-authenticate": "Bearer"}
_TOKEN_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Token</title><main><h1>This view needs its token</h1><p>The program printed it with the address.</p>
<form action="/" method="get"><p><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Open</button></p></form></main></html>
"""


class ViewAuth:
    """An ASGI application that passes authenticated requests on to ``app`` and answers all others itself."""

    def __init__(self, app: ASGIApp, *, token: str, secure: bool = False) -> None:
        """Create the application around ``app``, whose requests must have ``token``. With ``secure``, browsers send the
        cookie over TLS only."""
        self._app = app
        self._token = token.encode(errors="surrogateescape")
        self._secure = secure
        self._key = hashlib.sha256(b"headrace view " + self._token).hexdigest()
        """Value of the cookie: a digest of the token, so that a stolen cookie does not reveal the token itself."""
        self._cookie = f"headrace_view_{self._key[:8]}"
        """Name of the cookie; it differs for each token, because browsers share cookies among the ports of one host."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the application if it is authenticated; add the security headers to every
        response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            """Send a message of the application; add the security headers to the message that starts a response."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._answer(scope)
        if answer is None:
            mark_authorized(scope)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope) -> Response | None:
        """Return the response to a request that is not passed on to the application: the form for the token, the cookie
        after a correct token, or status 401. Return ``None`` for an authenticated request, which is passed on."""
        headers = Headers(scope=scope)
        given = parse_qs(scope["query_string"].decode("latin-1"), errors="replace").get("token", [""])[0]
        if given and scope["path"] == "/":
            return self._set_cookie() if hmac.compare_digest(given.encode(), self._token) else _token_page()
        kind, _, bearer = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if kind.lower() == b"bearer" and hmac.compare_digest(bearer.strip(), self._token):
            return None
        kept = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if hmac.compare_digest(kept.encode(), self._key.encode()):
            return None
        return _token_page() if scope["path"] == "/" else Response(status_code=401, headers=_BEARER_REQUIRED)

    def _set_cookie(self) -> Response:
        """Return a response that sets the cookie, and redirects to the page without the token in its URL."""
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            self._cookie, self._key, httponly=True, samesite="lax", secure=self._secure, max_age=7 * 86400
        )  # fmt: skip
        return answer


def _token_page() -> Response:
    """Return the page with a form for the token, with status 401."""
    return HTMLResponse(_TOKEN_PAGE, status_code=401, headers=_BEARER_REQUIRED)
