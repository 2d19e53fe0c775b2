"""The HTTP application of the session endpoint: its routes, and the responses to requests that fail. Programs (agents
that use a client library of OpenAI or Anthropic) send requests to it. The API key of a request identifies the session
of an episode, and the policy of the run answers the request."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.base.clock import Clock
from headrace.base.errors import BudgetSpent, EpisodeError, HeadraceError, RequestError
from headrace.base.net.connection import mark_authorized
from headrace.base.net.refusal import EVENTS, Refusal, refuse_request, refuse_unknown, respond_refused
from headrace.base.tasks import run_together, task_group
from headrace.base.types.chat import ChatOptions, Reply
from headrace.base.types.episode import get_role
from headrace.rollout.environments.agents import POLICY
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import (
    ChatProtocol,
    EndpointRequest,
    EventStream,
    ExchangeContext,
    Json,
    SessionLimits,
    SseEvent,
)
from headrace.wings.agents.chat import CHAT
from headrace.wings.agents.messages import MESSAGES, read_counted
from headrace.wings.agents.responses import RESPONSES
from headrace.wings.agents.sessions import EpisodeSession, Sessions
from headrace.wings.serve.body import BodyLimits, ClientGone, read_object, run_while_connected

PATHS = {"/chat/completions": CHAT, "/responses": RESPONSES, "/messages": MESSAGES}
"""The protocol of each path."""
COUNT = "/messages/count_tokens"
"""The path of requests for the number of tokens of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDispatcher:
    """The state that all requests of the endpoint share: the open sessions, the limits and the callbacks."""

    sessions: Sessions
    """The open sessions, by key."""
    limits: SessionLimits
    """The limits of each session."""
    clock: Clock
    """The clock for the times in answers."""
    on_ignored: Callable[[str, float | str], None]
    """A callback that receives the name and the value of each field of a request that has no effect on the policy."""
    agents: frozenset[str] = frozenset()
    """Names of the agents. A request whose model is the name of an agent is answered by that agent, and any other by
    the policy."""

    def with_agent(self, tree: Json, options: ChatOptions) -> ChatOptions:
        """Return ``options`` with the agent that the request's body ``tree`` names as its model; unchanged if there is
        no such agent."""
        model = tree.get("model")
        known = isinstance(model, str) and get_role(model) in self.agents
        return msgspec.structs.replace(options, agent=model) if known else options

    def body_limits(self) -> BodyLimits:
        """Return the limits for reading the body of one request."""
        limits = self.limits
        return BodyLimits(
            max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s, remedy="send a shorter conversation"
        )


def make_app(dispatcher: EndpointDispatcher) -> ASGIApp:
    """Return the whole endpoint as an ASGI application. Every path exists with and without ``/v1``. ``dispatcher`` has
    the state that all requests share."""

    async def models(request: Request) -> Response:
        """Answer with the valid values of a request's field ``model``: the policy and the agents."""
        dispatcher.sessions.find(request.headers)
        names = (POLICY, *sorted(dispatcher.agents))
        about = {"object": "model", "type": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [{"id": name, **about} for name in names], "has_more": False})

    routes: list[BaseRoute] = []
    for root in ("", "/v1"):
        handlers = {
            path: _EndpointHandler(dispatcher, protocol, _AnswerWork(dispatcher, protocol))
            for path, protocol in PATHS.items()
        }
        handlers[COUNT] = _EndpointHandler(dispatcher, MESSAGES, _count)
        routes += [Route(root + path, handler, methods=["POST"]) for path, handler in handlers.items()]
        routes.append(Route(f"{root}/models", models, methods=["GET"]))
    return _UnknownKeyDelay(
        dispatcher,
        Starlette(routes=routes, exception_handlers={Refusal: respond_refused, HTTPException: _respond_not_found}),
    )


class _UnknownKeyDelay:
    """An ASGI application that passes requests with the key of a session on to ``app``. Requests with a key that was
    never valid are refused after a delay, whatever their path."""

    def __init__(self, dispatcher: EndpointDispatcher, app: ASGIApp) -> None:
        """Create the application around ``app``, with the sessions of ``dispatcher``."""
        self._dispatcher, self._app = dispatcher, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on if its key belongs to a session that is open or has ended; otherwise refuse it after a
        delay, with status 401."""
        try:
            self._dispatcher.sessions.find(Headers(scope=scope))
        except Refusal as refusal:
            if refusal.status == 401:
                await asyncio.sleep(self._dispatcher.limits.delay_s)
                await refusal.response()(scope, receive, send)
                return
        mark_authorized(scope)
        await self._app(scope, receive, send)


class _ResponseWriter:
    """A writer of the response to one request: a JSON body, or server-sent events. The response starts with the first
    event."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create a writer for the request with these ASGI arguments. ``scope`` describes the request, ``receive``
        receives messages of the client, and ``send`` sends to it."""
        self._asgi = scope, receive, send
        self._send = send
        self._is_streaming = False
        """Whether the headers of a stream of events have been sent."""

    async def body(self, body: Json) -> None:
        """Send the JSON ``body`` as the whole response."""
        await JSONResponse(body)(*self._asgi)

    async def event(self, event: SseEvent) -> None:
        """Send one server-sent event; send the headers before the first event."""
        data = (
            event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False, allow_nan=False)
        )
        name = f"event: {event.name}\n" if event.name else ""
        await self.data(f"{name}data: {data}\n\n".encode())

    async def data(self, data: bytes) -> None:
        """Send ``data`` as the next bytes of the stream; send the headers before the first bytes."""
        if not self._is_streaming:
            self._is_streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End the response of a stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, refusal: Refusal, protocol: ChatProtocol) -> None:
        """Send ``refusal`` in the format of ``protocol``: as an error response or, if a stream has begun, as its last
        event."""
        if self._is_streaming:
            await self.event(protocol.broken(refusal))
            await self.end()
        else:
            await refusal.response(protocol.refusal(refusal))(*self._asgi)


class _EndpointHandler:
    """An ASGI application that answers ``POST`` requests to one path: it finds the session, reads the body, and calls
    ``work`` with both. It cancels the work when the client disconnects."""

    def __init__(
        self,
        dispatcher: EndpointDispatcher,
        protocol: ChatProtocol,
        work: Callable[[EpisodeSession, Json, _ResponseWriter], Awaitable[None]],
    ) -> None:
        """Create the handler of one path. ``work`` receives the session, the JSON of the body and the writer of the
        response, and ``protocol`` translates errors."""
        self._dispatcher, self._protocol, self._work = dispatcher, protocol, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: find its session by the key, read the body, and do the work while the client is
        connected. If the request is refused, send the refusal to the client, after a delay if the session has had many
        refusals."""
        request, writer = Request(scope, receive), _ResponseWriter(scope, receive, send)
        session: EpisodeSession | None = None
        try:
            session = self._dispatcher.sessions.find(request.headers)
            async with session.request():
                tree = await read_object(request, self._dispatcher.body_limits())
                await run_while_connected(receive, self._run_work(session, tree, writer))
        except ClientGone:
            return
        except Refusal as refusal:
            if session is None or session.count_refusal(refusal.problem) > self._dispatcher.limits.patience:
                await asyncio.sleep(self._dispatcher.limits.delay_s)
            await writer.refuse(refusal, self._protocol)

    async def _run_work(self, session: EpisodeSession, tree: Json, writer: _ResponseWriter) -> None:
        """Do the work for one request. An unexpected error is stored in the session, which raises it where the episode
        runs, and the client receives a refusal."""
        try:
            await _convert_errors(lambda: self._work(session, tree, writer))
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001 - raised again at the end of the session; the server continues
            session.failure = error
            words = f"the run failed: {error.problem if isinstance(error, HeadraceError) else type(error).__name__}"
            raise Refusal(words, remedy="end: this episode is over", status=500, code="internal") from None


@dataclass(frozen=True, slots=True)
class _AnswerWork:
    """The work for a request that the policy answers, in one protocol: read it, sample the answers, and write them."""

    dispatcher: EndpointDispatcher
    """What all requests share: sessions, limits and callbacks."""
    protocol: ChatProtocol
    """The translation of the protocol."""

    async def __call__(self, session: EpisodeSession, tree: Json, writer: _ResponseWriter) -> None:
        """Sample the answers to the request in ``tree``, the JSON of its body, and send them as one JSON body or as a
        stream of events."""
        context = ExchangeContext(
            name=secrets.token_hex(12),
            created_s=int(self.dispatcher.clock.wall()),
            spell=session.episode.spell,
            max_choices=self.dispatcher.limits.max_choices,
            histories=session.histories,
        )
        exchange = self.protocol.parse(tree, context)
        request, options = exchange.request, self.dispatcher.with_agent(tree, exchange.request.options)
        for name, value in request.ignored.items():
            self.dispatcher.on_ignored(name, value)
        if not request.stream:
            await writer.body(exchange.answer(await _sample_replies(session, request, options)))
            return
        events, pieces = exchange.stream(), _PieceBuffer()
        for event in events.end(
            await self._stream_while(_sample_replies(session, request, options, pieces), events, pieces, writer)
        ):
            await writer.event(event)
        await writer.end()

    async def _stream_while(
        self, work: Coroutine[Any, Any, list[Reply]], events: EventStream, pieces: _PieceBuffer, writer: _ResponseWriter
    ) -> list[Reply]:
        """Run ``work`` and return its replies. Meanwhile, send the pieces that it adds to the buffer as events, and
        pings while there are no pieces."""
        async with task_group() as group:
            task = group.create_task(work)
            task.add_done_callback(lambda _: pieces.arrived.set())
            await self._send_until_done(task, events, pieces, writer)
        return task.result()

    async def _send_until_done(
        self, task: asyncio.Task[Any], events: EventStream, pieces: _PieceBuffer, writer: _ResponseWriter
    ) -> None:
        """Send the pieces in the buffer as events until ``task``, which samples the answers, is done, and then the
        remaining pieces. If no piece arrives for ``ping_s`` seconds, send a ping."""
        while not task.done():
            if not await pieces.wait(self.dispatcher.limits.ping_s):
                await writer.data(self.protocol.ping)
            await _send_pieces(events, pieces, writer)
        await _send_pieces(events, pieces, writer)  # pieces that arrived as the task finished


class _PieceBuffer:
    """A buffer of pieces of answers that have been sampled but not sent. Pieces of one answer are joined, so that a
    slow client receives fewer and larger pieces."""

    def __init__(self) -> None:
        """Create an empty buffer."""
        self.arrived = asyncio.Event()
        """Set when there are pieces to send, or when the answers are complete."""
        self._waiting: dict[int, AnswerPiece] = {}
        """The joined pieces of each answer that have not been sent, by the number of the answer."""

    def on_piece(self, choice: int, piece: AnswerPiece) -> None:
        """Append ``piece`` to the pending text of answer number ``choice``, and wake the task that sends it."""
        earlier = self._waiting.get(choice)
        if earlier is not None:
            piece = msgspec.structs.replace(
                piece, reasoning=earlier.reasoning + piece.reasoning, content=earlier.content + piece.content
            )
        self._waiting[choice] = piece
        self.arrived.set()

    async def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until there are pieces to send or the answers are complete; return ``False`` after a
        timeout."""
        try:
            async with asyncio.timeout(seconds):
                await self.arrived.wait()
        except TimeoutError:
            return False
        return True

    def pop_all(self) -> list[tuple[int, AnswerPiece]]:
        """Remove all pieces and return them, each with the number of its answer."""
        pieces, self._waiting = [*self._waiting.items()], {}
        self.arrived.clear()
        return pieces


async def _send_pieces(events: EventStream, pieces: _PieceBuffer, writer: _ResponseWriter) -> None:
    """Send all pieces in the buffer as events, and empty the buffer."""
    for choice, piece in pieces.pop_all():
        for event in events.add(choice, piece):
            await writer.event(event)


async def _count(session: EpisodeSession, tree: Json, writer: _ResponseWriter) -> None:
    """Answer with the number of prompt tokens of the conversation in ``tree``, the JSON of the request's body."""
    request = read_counted(tree)
    await writer.body({"input_tokens": await session.episode.count(request.messages, request.tools)})


async def _sample_replies(
    session: EpisodeSession, request: EndpointRequest, options: ChatOptions, pieces: _PieceBuffer | None = None
) -> list[Reply]:
    """Sample as many answers to ``request`` as it asks for, concurrently, and return them. If they are streamed, their
    pieces are added to ``pieces``. The first failure cancels the other answers."""
    receivers = [None if pieces is None else partial(pieces.on_piece, choice) for choice in range(request.num_choices)]
    return await run_together(
        [session.episode.reply(request.messages, request.tools, options, on_piece) for on_piece in receivers]
    )


async def _convert_errors(work: Callable[[], Awaitable[None]]) -> None:
    """Await ``work`` and convert the errors that concern the client into a :class:`Refusal`: status 400 for an invalid
    request and for an error that ends the episode (403 if the budget is spent); 429 if the engine's queue is full; 500
    if the sequence failed in the engine. All other errors pass through."""
    try:
        await work()
    except EpisodeError as error:
        status = 403 if isinstance(error, BudgetSpent) else 400  # clients retry neither status
        raise Refusal(error.problem, remedy=error.remedy, status=status, code=error.reason) from None
    except RequestError as error:
        raise refuse_request(error) from None


async def _respond_not_found(request: Request, error: Exception) -> Response:
    """Return the response to a request for a path or a method that is not served; it lists the paths that are
    served."""
    known = ", ".join(f"/v1{path}" for path in (*PATHS, COUNT))
    return refuse_unknown(request, error, f"POST {known}; GET /v1/models").response()
