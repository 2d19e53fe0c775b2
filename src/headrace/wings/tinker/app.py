"""The HTTP side of a server of the Tinker protocol: routes, the check of the key, limits on bodies, and error
responses.

Each endpoint reads its request and passes the body to a method of
:class:`~headrace.wings.tinker.service.TinkerService`, which does the work. Clients send the server's key in the header
``x-api-key``; health checks and signed URLs need no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError
from headrace.base.net.connection import mark_authorized
from headrace.base.net.refusal import RETRY_AFTER_S, Refusal, excerpt
from headrace.wings.tinker import schema, wire
from headrace.wings.tinker.catalog import Catalog
from headrace.wings.tinker.service import TinkerService, is_number
from headrace.wings.tinker.tenants import log

PREFIX = "/api/v1"
URLS_S = 3600
"""Seconds for which the signed URLs of files are valid."""

JSON_BYTES = 16 * 2**20
"""The largest size of a JSON body. The decoded numbers need many times as much memory."""
BEGINNING_BYTES = 4096
"""The number of bytes that are kept of a too long body, to read the model and the number of the request from them."""

LOADING_S = 30.0
"""Seconds for which a request waits while the models are loaded; the client waits 60 s for an answer."""

REFUSED = {
    "auth/token": "this server takes its key as it is",
    "create_custom_loss": "losses are not stored: pass the function to forward_backward_custom",
    "retrieve_futures": "results are fetched one by one: client/config says so",
    "join_sampling_session": "clones of a sampling client draw their own numbers: client/config says so",
    "copy_weights": "there is one project on this server",
    "sessions/search": "list the sessions instead",
    "audit": "this server keeps no audit log",
    "billing": "nothing is billed here",
}
"""The path prefixes of endpoints that are refused, with the reason; other paths that are not served are answered as
unknown."""
REFUSED_PARTS = {
    "publish": "there is one user on this server",
    "project": "there is one project on this server",
    "trace_export": "no trace is kept",
}
"""The endpoints that are refused by the last part of their path, with the reason."""


class ServerHolder:
    """A holder of the service, which is set once the models are loaded. The server listens before that; requests then
    wait for the service, or receive status 503, after which clients retry."""

    def __init__(self) -> None:
        """Create a holder without a service."""
        self._service: TinkerService | None = None
        """The service; ``None`` while the models are loaded."""
        self._changed = asyncio.Event()
        """Set once the service is there, or once the server ends."""

    def serve(self, service: TinkerService) -> None:
        """Let ``service`` answer requests from now on."""
        self._service = service
        self._changed.set()

    def now(self) -> TinkerService:
        """Return the service at once. Raises :class:`Refusal` with status 503, after which the client retries, if the
        models are still being loaded."""
        if self._service is None:
            raise Refusal("the model is being loaded", remedy="ask again soon", status=503)
        return self._service

    async def ready(self) -> TinkerService:
        """Wait for the service for at most :data:`LOADING_S` seconds, and return it. The wait is needed because some
        calls of the client retry too few times. Raises :class:`Refusal` with status 503 if the models are still being
        loaded after that."""
        if self._service is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOADING_S)
        return self.now()

    def end_waits(self) -> None:
        """End all waits for the service and for results, because the server ends. The waiting requests receive an error
        after which their clients retry."""
        self._changed.set()
        if self._service is not None:
            self._service.end_waits()


class UrlSigner:
    """A signer of URLs from which files can be downloaded without the key. A signed URL contains its time of expiry and
    an HMAC-SHA256 signature made with the key."""

    def __init__(self, key: str, clock: Clock) -> None:
        """Make a signer that signs with the server's ``key``; ``clock`` gives the time by which URLs expire."""
        self._key, self._clock = key.encode(), clock

    def sign(self, urls: Mapping[str, URL]) -> dict[str, Any]:
        """Return the JSON answer for a client that wants to download files: a signed form of each of the ``urls`` (by
        file name), and the time until which they are valid."""
        until = int(self._clock.wall()) + URLS_S
        signed = {
            name: str(url.include_query_params(expires=until, signature=self._signature(url.path, str(until))))
            for name, url in urls.items()
        }
        return {"urls": signed, "expires": datetime.fromtimestamp(until, UTC).isoformat()}

    def signed(self, request: Request) -> bool:
        """Return whether a request is a GET or HEAD of a URL that :meth:`sign` returned and that is still valid."""
        until, given = (request.query_params.get(name, "") for name in ("expires", "signature"))
        if request.method not in ("GET", "HEAD") or not is_number(until) or int(until) < self._clock.wall():
            return False
        return hmac.compare_digest(given.encode(), self._signature(request.url.path, until).encode())

    def _signature(self, path: str, until: str) -> str:
        """Return the signature of a ``path`` that is valid until the time ``until`` (seconds since 1970, as text)."""
        return hmac.new(self._key, f"{path} {until}".encode(), hashlib.sha256).hexdigest()


class KeyAuth:
    """An ASGI application that authenticates requests for ``app``. It passes on requests with the server's ``key``,
    requests for a signed URL and health checks, and answers all others with status 401."""

    def __init__(self, app: ASGIApp, key: str, signer: UrlSigner) -> None:
        """Create the application around ``app``; ``signer`` verifies signed URLs."""
        self._app, self._key, self._signer = app, key.encode(), signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate one request, and pass it on to the application or answer it with status 401."""
        if scope["type"] == "http" and scope["path"] not in ("/healthz", f"{PREFIX}/healthz"):
            given = Headers(scope=scope).get("x-api-key", "").encode("latin-1")
            if not (hmac.compare_digest(given.strip(), self._key) or self._signer.signed(Request(scope))):
                problem = Refusal(
                    "the request does not carry this server's key",
                    remedy="export TINKER_API_KEY as headrace tinker printed it",
                    status=401,
                )
                await _respond_refused(Request(scope, receive), problem)(scope, receive, send)
                return
            mark_authorized(scope)
        await self._app(scope, receive, send)


def make_app(holder: ServerHolder, key: str, *, max_body_bytes: int, clock: Clock) -> KeyAuth:
    """Return the whole server as an ASGI application: the routes, which call the service of ``holder``, behind the
    check of ``key``. ``max_body_bytes`` is the largest size of the body of any request. ``clock`` gives the time by
    which signed URLs expire."""
    signer = UrlSigner(key, clock)
    routes = _Routes(holder, max_body_bytes, signer)
    app = Starlette(
        routes=routes.all(),
        exception_handlers={
            HeadraceError: _respond_refused,
            HTTPException: _respond_not_found,
            ClientDisconnect: _respond_disconnected,
            sqlite3.OperationalError: _respond_not_written,
            Exception: _respond_broken,
        },
    )
    return KeyAuth(app, key, signer)


class LongBody(Refusal):
    """The refusal of a request whose body is longer than bodies may be, with status 413."""

    def __init__(self, max_bytes: int, beginning: bytes) -> None:
        """Create the error for a body that has more than ``max_bytes`` bytes and begins with ``beginning``."""
        super().__init__(f"the body has more than {max_bytes} bytes", remedy="send less in each request", status=413)
        self.beginning = beginning
        """The first :data:`BEGINNING_BYTES` bytes of the body."""


Endpoint = Callable[[Request], Awaitable[Response]]


class _Routes:
    """The endpoints of the server. The methods that return an ``Endpoint`` build an endpoint from a function that
    computes its answer; the other ``async`` methods are endpoints themselves."""

    def __init__(self, holder: ServerHolder, max_body_bytes: int, signer: UrlSigner) -> None:
        """Create the endpoints, which call the service of ``holder``. ``max_body_bytes`` bounds every body, and
        ``signer`` signs the URLs of files."""
        self._holder, self._max_body_bytes, self._signer = holder, max_body_bytes, signer

    def all(self) -> list[Route]:
        """Return all routes of the server: each path with its method and its endpoint. Each endpoint belongs to one
        method of :class:`~headrace.wings.tinker.service.TinkerService`."""
        checkpoint = f"{PREFIX}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}"
        return [
            *(Route(f"{PREFIX}/{path}", endpoint, methods=["POST"]) for path, endpoint in self._make_posts().items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in self._make_gets().items()),
            Route(f"{PREFIX}/sessions/{{session}}/finish", self._finish, methods=["POST"]),
            Route(checkpoint, self._delete, methods=["DELETE"]),
            Route(f"{checkpoint}/ttl", self._ttl, methods=["PUT"]),
        ]

    def _make_posts(self) -> dict[str, Endpoint]:
        """Return the endpoints of POST requests by their paths below :data:`PREFIX`."""
        model_kinds = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
        return {
            "client/config": self._make_fixed_endpoint({}, schema.ClientConfigBody),
            "client/dynamic_config": self._make_fixed_endpoint(
                {"sample_cancel_enabled": True}, schema.ClientConfigBody
            ),
            "create_session": self._make_post_endpoint(TinkerService.create_session),
            "session_heartbeat": self._make_post_endpoint(TinkerService.heartbeat),
            "create_model": self._make_post_endpoint(TinkerService.create_model),
            "get_info": self._make_post_endpoint(TinkerService.get_info),
            "forward_backward": self._make_ordered_endpoint(
                TinkerService.train, wire.read_model_and_seq, self._max_body_bytes
            ),
            "load_weights": self._make_ordered_endpoint(TinkerService.load_weights, schema.read_model_and_seq),
            "create_sampling_session": self._make_post_endpoint(TinkerService.create_sampling_session),
            "asample": self._make_post_endpoint(TinkerService.sample),
            "retrieve_future": self._retrieve,
            "cancel_future": self._make_post_endpoint(TinkerService.cancel),
            "telemetry": self._telemetry,
            "weights_info": self._make_post_endpoint(lambda service, body: service.catalog.weights_info(body)),
            **{
                kind: self._make_ordered_endpoint(partial(TinkerService.accept, kind=kind), schema.read_model_and_seq)
                for kind in model_kinds
            },
        }

    def _make_gets(self) -> dict[str, Endpoint]:
        """Return the endpoints of GET requests by their paths."""
        run = f"{PREFIX}/training_runs/{{model}}"
        checkpoint = f"{run}/checkpoints/{{kind}}/{{name}}"
        return {
            "/healthz": self._healthz,
            f"{PREFIX}/healthz": self._healthz,
            f"{PREFIX}/get_server_capabilities": self._make_get_endpoint(lambda service, _: service.capabilities()),
            f"{PREFIX}/samplers/{{sampler}}": self._make_get_endpoint(
                lambda service, path: service.get_sampler(path["sampler"])
            ),
            f"{PREFIX}/sessions/{{session}}": self._make_get_endpoint(
                lambda service, path: service.catalog.session(path["session"])
            ),
            f"{PREFIX}/sessions": self._make_list_endpoint(
                lambda service, query, *page: service.catalog.sessions(*page)
            ),
            f"{PREFIX}/training_runs": self._make_list_endpoint(
                lambda service, query, *page: service.catalog.training_runs(*page, query.get("project_id"))
            ),
            f"{PREFIX}/checkpoints": self._make_list_endpoint(
                lambda service, query, *page: service.catalog.checkpoints(None, *page)
            ),
            run: self._make_get_endpoint(lambda service, path: service.catalog.training_run(path["model"])),
            f"{run}/checkpoints": self._make_get_endpoint(
                lambda service, path: service.catalog.checkpoints(path["model"])
            ),
            f"{checkpoint}/external_weights_urls": self._urls,
            f"{checkpoint}/files/{{file}}": self._file,
        }

    async def _catalog(self) -> Catalog:
        """Wait for the service, and return its catalogue of sessions, models and checkpoints."""
        return (await self._holder.ready()).catalog

    def _make_fixed_endpoint(self, answer: dict[str, Any], kind: type[schema.TinkerBody]) -> Endpoint:
        """Return an endpoint that validates the body of a request as a ``kind``, and always returns the same JSON
        ``answer``."""

        async def endpoint(request: Request) -> Response:
            """Check the body, and answer with the fixed JSON."""
            schema.parse(await self._body(request), kind)
            return JSONResponse(answer)

        return endpoint

    def _make_post_endpoint(self, answer: Callable[[TinkerService, bytes], dict[str, Any]]) -> Endpoint:
        """Return an endpoint whose JSON answer the function ``answer`` computes from the service and the body of the
        request."""

        async def endpoint(request: Request) -> Response:
            """Answer with the JSON that is computed from the body."""
            return JSONResponse(answer(await self._holder.ready(), await self._body(request)))

        return endpoint

    def _make_get_endpoint(self, answer: Callable[[TinkerService, Any], dict[str, Any]]) -> Endpoint:
        """Return an endpoint whose JSON answer the function ``answer`` computes from the service and the parameters in
        the path of the request."""

        async def endpoint(request: Request) -> Response:
            """Answer with the JSON that is computed from the parameters in the path."""
            return JSONResponse(answer(await self._holder.ready(), request.path_params))

        return endpoint

    def _make_list_endpoint(self, answer: Callable[..., dict[str, Any]]) -> Endpoint:
        """Return an endpoint that answers with one page of a list. The function ``answer`` receives the service, the
        query parameters, and ``limit`` and ``offset`` as integers (20 and 0 by default)."""

        async def endpoint(request: Request) -> Response:
            """Answer with the requested page. Raises :class:`Refusal` for a limit or offset that is not a whole
            number."""
            page = [request.query_params.get(name, str(default)) for name, default in (("limit", 20), ("offset", 0))]
            if not all(map(is_number, page)):
                raise Refusal(f"limit and offset are {excerpt(page)}", remedy="give whole numbers")
            return JSONResponse(answer(await self._holder.ready(), request.query_params, *map(int, page)))

        return endpoint

    def _make_ordered_endpoint(
        self,
        answer: Callable[[TinkerService, bytes], dict[str, Any]],
        read_model_and_seq: Callable[[bytes], tuple[str, int]],
        max_bytes: int = JSON_BYTES,
    ) -> Endpoint:
        """Return an endpoint that accepts a request of a model, to be computed in the order of the model's requests. If
        its body has more than ``max_bytes`` bytes, the request is recorded as failed, so that later requests of the
        model do not wait for it; ``read_model_and_seq`` reads the model and the request's number from the beginning of
        the body. ``answer`` records the request, and returns the answer for the client."""

        async def endpoint(request: Request) -> Response:
            """Accept the request, and answer with the request id under which the client polls for the result. If its
            body is too long, record it as failed, and raise :class:`LongBody`."""
            service = await self._holder.ready()
            try:
                body = await self._body(request, max_bytes)
            except LongBody as error:
                service.refuse(read_model_and_seq, error.beginning, error)
                raise
            return JSONResponse(answer(service, body))

        return endpoint

    async def _retrieve(self, request: Request) -> Response:
        """Answer with the result of an earlier request, or with status 408 if there is none yet, after which the client
        polls again."""
        result = await (await self._holder.ready()).retrieve(await self._body(request))
        return Response(result.body, media_type=result.media, status_code=result.status)

    async def _telemetry(self, request: Request) -> Response:
        """Accept the client's telemetry and ignore it."""
        await self._body(request)
        return JSONResponse({"status": "accepted"})

    async def _healthz(self, _: Request) -> Response:
        """Answer a health check: status 200 if the models are loaded, status 503 while they are being loaded."""
        self._holder.now()
        return JSONResponse({"status": "ok"})

    async def _finish(self, request: Request) -> Response:
        """End the session that the path names."""
        await self._body(request)
        return JSONResponse((await self._holder.ready()).finish(request.path_params["session"]))

    async def _delete(self, request: Request) -> Response:
        """Delete the checkpoint that the path names, in a thread, and answer with status 204."""
        catalog = await self._catalog()
        await asyncio.to_thread(catalog.delete_checkpoint, request.path_params["model"], _get_checkpoint_name(request))
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        """Set the time to live of the checkpoint that the path names."""
        catalog, body = await self._catalog(), await self._body(request)
        catalog.set_ttl(request.path_params["model"], _get_checkpoint_name(request), body)
        return Response(status_code=204)

    async def _urls(self, request: Request) -> Response:
        """Answer with signed URLs, one for each file of a checkpoint. They need no key, and are valid for
        :data:`URLS_S` seconds."""
        files = (await self._catalog()).list_files(request.path_params["model"], _get_checkpoint_name(request))
        root = request.url.path.removesuffix("external_weights_urls")
        urls = {file: request.url.replace(path=f"{root}files/{file}", query="") for file in files}
        return JSONResponse(self._signer.sign(urls))

    async def _file(self, request: Request) -> Response:
        """Answer with the content of one file of a checkpoint."""
        path = request.path_params
        return FileResponse(
            (await self._catalog()).find_file(path["model"], _get_checkpoint_name(request), path["file"])
        )

    async def _body(self, request: Request, max_bytes: int = JSON_BYTES) -> bytes:
        """Read and return the body of a request. Raises :class:`LongBody` if it has more than ``max_bytes`` bytes or
        more than the server's limit for all requests, and :class:`Refusal` with status 415 if it is compressed."""
        max_bytes = min(max_bytes, self._max_body_bytes)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal("the body is compressed", remedy="send it as it is: client/config says so", status=415)
        parts, size = list[bytes](), 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise LongBody(max_bytes, b"".join([*parts, part])[:BEGINNING_BYTES])
            parts.append(part)
        return b"".join(parts)


def _get_checkpoint_name(request: Request) -> str:
    """Return the name ``KIND/NAME`` of the checkpoint in the path of a request."""
    return f"{request.path_params['kind']}/{request.path_params['name']}"


def _respond_refused(_: Request, error: Exception) -> Response:
    """Return an error of Headrace as a JSON response in the client's format. Statuses 429 and 503 have the header
    ``retry-after``."""
    assert isinstance(error, HeadraceError)
    status = error.status if isinstance(error, Refusal) else 400
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    words = f"{error.problem}; {error.remedy}"
    body = {"error": words, "category": "user", "detail": words}
    return Response(json.dumps(body), media_type="application/json", status_code=status, headers=headers)


def _respond_not_found(request: Request, error: Exception) -> Response:
    """Return the response to a request for a path that is not served. It contains the reason if the path belongs to a
    part of the protocol that Headrace does not implement."""
    assert isinstance(error, HTTPException)
    path = request.url.path.removeprefix(f"{PREFIX}/")
    why = next((why for name, why in REFUSED.items() if path.startswith(name)), None)
    why = why or REFUSED_PARTS.get(path.rpartition("/")[2])
    status = error.status_code if why is None else 404  # not 405, if the path has other methods
    why = why or "docs/tinker.md lists what is served"
    return _respond_refused(request, Refusal(f"{excerpt(path)} is not served", remedy=why, status=status))


def _respond_not_written(request: Request, error: Exception) -> Response:
    """Return the response (status 503) to a request that cannot be written to the journal, for example because the disk
    is full. The client retries."""
    problem = f"the server cannot write its state: {error}"
    log.warning("%s", problem)
    return _respond_refused(request, Refusal(problem, remedy="make room on its disk, and ask again", status=503))


def _respond_disconnected(_: Request, __: Exception) -> Response:
    """Return a placeholder response. The client closed the connection before its body was complete, so the response is
    not sent."""
    return Response(status_code=400)


def _respond_broken(_: Request, error: Exception) -> Response:
    """Return the response (status 500) to a request during which an unexpected error of the server occurred."""
    words = f"the server failed: {type(error).__name__}: {error}"
    return JSONResponse({"error": words, "category": "server", "detail": words}, status_code=500)
