"""The HTTP application of ``headrace serve``: its routes, and the responses to requests that fail. A refusal is an
error that becomes the HTTP response to one request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.base.errors import ComponentDied, RequestError
from headrace.base.net.auth import TokenAuth
from headrace.base.net.refusal import Refusal, refuse_request, refuse_unknown, respond_refused
from headrace.base.types.messages.controller import EngineStats
from headrace.launch.inprocess import LocalEngine
from headrace.wings.serve.answering import (
    AnswerEventStream,
    Meter,
    ParsedRequest,
    Service,
    answer_whole,
    make_engine_refusal,
    parse_request,
)
from headrace.wings.serve.body import ClientGone, run_while_connected
from headrace.wings.serve.choices import sample_all
from headrace.wings.serve.metrics import ServerMetrics
from headrace.wings.serve.prompts import check_model
from headrace.wings.serve.tokens import detokenize, tokenize

A = TypeVar("A")
COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@dataclass(slots=True, eq=False)
class ServerState:
    """The state of the server, which the routes read: starting ──▶ serving ──▶ draining. The code that starts and ends
    the server changes it."""

    service: Service | None = None
    """The service that answers requests; ``None`` until the model is loaded."""
    draining: bool = False
    """Whether the server is ending: running requests continue, and new requests are refused."""

    def ready(self) -> Service:
        """Return the service that answers requests. Raises :class:`Refusal` while the server starts or ends, and after
        the engine has died."""
        if self.draining:
            raise Refusal("the server is ending", remedy="ask another one", status=503, code="ending")
        if self.service is None:
            raise Refusal("the model is being loaded", remedy="try again later", status=503, code="starting")
        engine = self.service.engine
        if isinstance(engine, LocalEngine) and engine.death is not None:
            raise make_engine_refusal(engine.death)
        return self.service

    def stats(self) -> EngineStats | None:
        """Return the engine's counters; ``None`` before the model is loaded."""
        return self.service.engine.stats() if self.service else None


def make_app(state: ServerState, token: str) -> TokenAuth:
    """Return the whole server as an ASGI application, which answers requests with the service in ``state``. Every
    request must have ``token``, unless the token is empty."""
    metrics = ServerMetrics(state.stats)
    answer = _CompletionHandler(state, metrics)

    async def health(_: Request) -> Response:
        """Answer a health check with the version of the weights in use; status 503 if requests cannot be served."""
        service = state.ready()
        return JSONResponse({"status": "ok", "version": service.engine.stats().version})

    async def figures(_: Request) -> Response:
        """Answer with the server's metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(_: Request) -> Response:
        """Answer with the list of valid model names of requests: the served model, and the agents with adapters."""
        service = state.ready()
        names = (service.served.name, *service.served.agents)
        return JSONResponse({"object": "list", "data": [_describe_model(service, name) for name in names]})

    async def model(request: Request) -> Response:
        """Answer with the description of the model that the path names; status 404 if it is not served."""
        service = state.ready()
        name = request.path_params["name"]
        check_model(name, service.served)
        return JSONResponse(_describe_model(service, name))

    async def encoded(request: Request) -> Response:
        """Answer ``POST /tokenize``."""
        return await tokenize(request, state.ready())

    async def decoded(request: Request) -> Response:
        """Answer ``POST /detokenize``."""
        return await detokenize(request, state.ready())

    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/metrics", figures, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/tokenize", encoded, methods=["POST"]),
            Route("/detokenize", decoded, methods=["POST"]),
            *(Route(path, answer, methods=["POST"]) for path in COMPLETIONS),
        ],
        exception_handlers={Refusal: respond_refused, HTTPException: _respond_not_found, Exception: _respond_broken},
    )
    return TokenAuth(app, token=token)


class _CompletionHandler:
    """An ASGI application that answers ``POST`` requests for completions, chat completions and responses. It cancels
    the sampling when the client disconnects."""

    def __init__(self, state: ServerState, metrics: ServerMetrics) -> None:
        """Create the handler. ``state`` has the service that answers requests; ``metrics`` counts them."""
        self._state, self._metrics = state, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and count it in the metrics by its path and status."""
        path = scope["path"]
        status = 500
        self._metrics.open.inc()
        try:
            status = await self._answer(scope, receive, send)
        except ClientGone:
            status = 499  # nginx's code for a client that closed the connection
            self._metrics.left.inc()
        finally:
            self._metrics.open.dec()
            self._metrics.requests.labels(path, status).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Read a request and send its answer, as a stream or as one JSON body; return the HTTP status. ``scope``,
        ``receive`` and ``send`` are ASGI's arguments of the request. If the client disconnects, stop sampling and raise
        :class:`ClientGone`."""
        request = Request(scope, receive)
        try:
            service = self._state.ready()
            meter = Meter(service, self._metrics, scope["path"])
            parsed = await parse_request(request, service)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return refusal.status
        try:
            if parsed.body.stream:
                return await run_while_connected(
                    receive, self._respond_stream(parsed, service, meter, (scope, receive, send))
                )
            response = await run_while_connected(receive, self._respond_whole(parsed, service, meter))
            await response(scope, receive, send)
            return response.status_code
        finally:
            meter.end()

    async def _respond_whole(self, parsed: ParsedRequest, service: Service, meter: Meter) -> Response:
        """Return the whole answer to a request, or its refusal, as an HTTP response."""
        refusal = await _capture_refusal(lambda: answer_whole(parsed, service, meter))
        return refusal.response() if isinstance(refusal, Refusal) else refusal

    async def _respond_stream(
        self, parsed: ParsedRequest, service: Service, meter: Meter, asgi: tuple[Scope, Receive, Send]
    ) -> int:  # fmt: skip
        """Send the answer to ``parsed`` as a stream of events, sampled by the engine of ``service`` and measured by
        ``meter``, and return the HTTP status. A refusal before the first event is sent as an HTTP response, and a later
        refusal as the last event. ``asgi`` are ASGI's scope, receive and send of the request."""
        events = AnswerEventStream.create(parsed, meter, asgi[2])
        refusal = await _capture_refusal(
            lambda: sample_all(service.engine, parsed.choices, parsed.text_options, events.write)
        )
        if not isinstance(refusal, Refusal):
            await events.finish()
            return 200
        if events.has_started:
            await events.fail(refusal)
        else:
            await refusal.response()(*asgi)
        return refusal.status


async def _capture_refusal(work: Callable[[], Awaitable[A]]) -> A | Refusal:
    """Return the result of ``work``; if the engine refuses the request or fails, return the error as a
    :class:`Refusal`."""
    try:
        return await work()
    except Refusal as refusal:
        return refusal
    except RequestError as error:
        return refuse_request(error)
    except ComponentDied as error:
        return make_engine_refusal(error)


def _describe_model(service: Service, name: str) -> dict[str, object]:
    """Return the description of the model ``name`` in OpenAI's format, with its context in tokens and the version of
    its weights."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "headrace",
        "max_model_len": service.served.max_context,
        "version": service.engine.stats().version,
    }


async def _respond_not_found(request: Request, error: Exception) -> Response:
    """Return the response to a request for a path or a method that is not served; it lists the paths that are
    served."""
    known = "GET /health, /metrics, /v1/models; POST " + ", ".join((*COMPLETIONS, "/tokenize", "/detokenize"))
    return refuse_unknown(request, error, known).response()


async def _respond_broken(_: Request, error: Exception) -> Response:
    """Return the HTTP response, with status 500, to a request during which an unexpected error occurred."""
    words = f"the server failed: {type(error).__name__}"
    return Refusal(words, remedy="look at the server's log, and report it", status=500, code="internal").response()
