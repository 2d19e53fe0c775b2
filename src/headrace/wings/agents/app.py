"""The endpoint's routes, and every way a request can end."""

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
from headrace.base.errors import BudgetSpent, EngineFull, EpisodeError, HeadraceError, RequestError, SequenceFailed
from headrace.base.net.connection import mark_entitled
from headrace.base.net.refusal import Refusal, shown
from headrace.base.types.chat import ChatOptions, Reply
from headrace.base.types.episode import role_of
from headrace.rollout.environments.agents import POLICY
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import ChatProtocol, EndpointRequest, Json, SessionLimits, Setting, SseEvent, Telling
from headrace.wings.agents.chat import CHAT
from headrace.wings.agents.messages import MESSAGES, read_counted
from headrace.wings.agents.responses import RESPONSES
from headrace.wings.agents.sessions import EpisodeSession, Sessions
from headrace.wings.serve.body import BodyLimits, read_object
from headrace.wings.serve.watch import ClientGone, while_connected

PATHS = {"/chat/completions": CHAT, "/responses": RESPONSES, "/messages": MESSAGES}
COUNT = "/messages/count_tokens"

_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDispatcher:
    """What all requests share."""

    sessions: Sessions
    limits: SessionLimits
    clock: Clock
    on_wish: Callable[[str, float | str], None]
    """Told what a request wishes and does not get."""
    agents: frozenset[str] = frozenset()
    """Who answers where a request names it as its model, beside the policy."""

    def whose(self, tree: Json, options: ChatOptions) -> ChatOptions:
        """The options of a request, with the agent that its model names."""
        model = tree.get("model")
        known = isinstance(model, str) and role_of(model) in self.agents
        return msgspec.structs.replace(options, agent=model) if known else options

    def body_limits(self) -> BodyLimits:
        """Of one request."""
        limits = self.limits
        return BodyLimits(
            max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s, remedy="send a shorter conversation"
        )


def make_app(desk: EndpointDispatcher) -> ASGIApp:
    """The whole endpoint as an ASGI application; every path is there with and without ``/v1``."""

    async def models(request: Request) -> Response:
        desk.sessions.find(request.headers)
        names = (POLICY, *sorted(desk.agents))
        about = {"object": "model", "type": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [{"id": name, **about} for name in names], "has_more": False})

    routes: list[BaseRoute] = []
    for root in ("", "/v1"):
        handlers = {path: _EndpointHandler(desk, dialect, _Answering(desk, dialect)) for path, dialect in PATHS.items()}
        handlers[COUNT] = _EndpointHandler(desk, MESSAGES, _Counting())
        routes += [Route(root + path, handler, methods=["POST"]) for path, handler in handlers.items()]
        routes.append(Route(f"{root}/models", models, methods=["GET"]))
    return _StrangerDelay(
        desk, Starlette(routes=routes, exception_handlers={Refusal: _refused, HTTPException: _not_found})
    )


class _StrangerDelay:
    """Who brings no key that was ever given is told so after a while, whatever is asked, and nothing else."""

    def __init__(self, desk: EndpointDispatcher, app: ASGIApp) -> None:
        self._desk, self._app = desk, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._desk.sessions.find(Headers(scope=scope))
        except Refusal as refusal:
            if refusal.status == 401:
                await asyncio.sleep(self._desk.limits.delay_s)
                await refusal.response()(scope, receive, send)
                return
        mark_entitled(scope)
        await self._app(scope, receive, send)


class _Wire:
    """One request's answer on its way: a body, or events, which begin with the first thing there is to say."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi = scope, receive, send
        self._send = send
        self._streams = False

    async def body(self, body: Json) -> None:
        """All of it."""
        await JSONResponse(body)(*self._asgi)

    async def event(self, event: SseEvent) -> None:
        """One more event."""
        data = (
            event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False, allow_nan=False)
        )
        name = f"event: {event.name}\n" if event.name else ""
        await self.data(f"{name}data: {data}\n\n".encode())

    async def data(self, data: bytes) -> None:
        """More of the stream, as it is."""
        if not self._streams:
            self._streams = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The stream is whole."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, refusal: Refusal, dialect: ChatProtocol) -> None:
        """No answer, and why."""
        if self._streams:
            await self.event(dialect.broken(refusal))
            await self.end()
        else:
            await refusal.response(dialect.refusal(refusal))(*self._asgi)


class _EndpointHandler:
    """``POST`` to one path, as an ASGI application: it watches the connection while it works."""

    def __init__(
        self,
        desk: EndpointDispatcher,
        dialect: ChatProtocol,
        work: Callable[[EpisodeSession, Json, _Wire], Awaitable[None]],
    ) -> None:
        self._desk, self._dialect, self._work = desk, dialect, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, wire = Request(scope, receive), _Wire(scope, receive, send)
        session: EpisodeSession | None = None
        try:
            session = self._desk.sessions.find(request.headers)
            async with session.request():
                tree = await read_object(request, self._desk.body_limits())
                await while_connected(receive, self._guarded(session, tree, wire))
        except ClientGone:
            return
        except Refusal as refusal:
            if session is None or session.refused(refusal.problem) > self._desk.limits.patience:
                await asyncio.sleep(self._desk.limits.delay_s)
            await wire.refuse(refusal, self._dialect)

    async def _guarded(self, session: EpisodeSession, tree: Json, wire: _Wire) -> None:
        try:
            await _in_words(lambda: self._work(session, tree, wire))
        except Refusal:
            raise
        except Exception as error:  # noqa: BLE001 - kept for whoever runs the episode; the server goes on
            session.failure = error
            words = f"the run failed: {error.problem if isinstance(error, HeadraceError) else type(error).__name__}"
            raise Refusal(words, remedy="end: this episode is over", status=500, code="internal") from None


@dataclass(frozen=True, slots=True)
class _Answering:
    """An answer in one protocol."""

    desk: EndpointDispatcher
    dialect: ChatProtocol

    async def __call__(self, session: EpisodeSession, tree: Json, wire: _Wire) -> None:
        setting = Setting(
            name=secrets.token_hex(12),
            created_s=int(self.desk.clock.wall()),
            spell=session.episode.spell,
            max_choices=self.desk.limits.max_choices,
            histories=session.histories,
        )
        exchange = self.dialect.understand(tree, setting)
        asked, options = exchange.asked, self.desk.whose(tree, exchange.asked.options)
        for name, value in asked.wishes.items():
            self.desk.on_wish(name, value)
        if not asked.stream:
            await wire.body(exchange.whole(await _replies(session, asked, options)))
            return
        telling, pieces = exchange.stream(), _Pieces()
        for event in telling.end(await self._told(_replies(session, asked, options, pieces), telling, pieces, wire)):
            await wire.event(event)
        await wire.end()

    async def _told(
        self, work: Coroutine[Any, Any, list[Reply]], telling: Telling, pieces: _Pieces, wire: _Wire
    ) -> list[Reply]:
        """What ``work`` returns, told as it grows; the stream is kept alive where there is nothing to say."""
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(work)
                task.add_done_callback(lambda _: pieces.came.set())
                await self._tell_while(task, telling, pieces, wire)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return task.result()

    async def _tell_while(self, task: asyncio.Task[Any], telling: Telling, pieces: _Pieces, wire: _Wire) -> None:
        while not task.done():
            if not await pieces.wait(self.desk.limits.ping_s):
                await wire.data(self.dialect.ping)
            await _tell(telling, pieces, wire)
        await _tell(telling, pieces, wire)  # what came with its end


class _Pieces:
    """What has become certain of answers, and was not told yet. A client that reads slowly is told more at once."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self._waiting: dict[int, AnswerPiece] = {}

    def hear(self, choice: int, piece: AnswerPiece) -> None:
        """More of one of them."""
        held = self._waiting.get(choice)
        if held is not None:
            piece = msgspec.structs.replace(
                piece, reasoning=held.reasoning + piece.reasoning, content=held.content + piece.content
            )
        self._waiting[choice] = piece
        self.came.set()

    async def wait(self, seconds: float) -> bool:
        """Until there is something, or so long; whether there is."""
        try:
            async with asyncio.timeout(seconds):
                await self.came.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> list[tuple[int, AnswerPiece]]:
        """All that there is."""
        taken, self._waiting = [*self._waiting.items()], {}
        self.came.clear()
        return taken


async def _tell(telling: Telling, pieces: _Pieces, wire: _Wire) -> None:
    """All that has come."""
    for choice, piece in pieces.take():
        for event in telling.grow(choice, piece):
            await wire.event(event)


@dataclass(frozen=True, slots=True)
class _Counting:
    """The tokens of a conversation that is not answered."""

    async def __call__(self, session: EpisodeSession, tree: Json, wire: _Wire) -> None:
        asked = read_counted(tree)
        await wire.body({"input_tokens": await session.episode.count(asked.messages, asked.tools)})


async def _replies(
    session: EpisodeSession, asked: EndpointRequest, options: ChatOptions, pieces: _Pieces | None = None
) -> list[Reply]:
    """Every answer that is asked for, side by side, told to ``pieces`` as it grows; the first failure ends the
    others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for choice in range(asked.num_choices):
                hear = None if pieces is None else partial(pieces.hear, choice)
                tasks.append(group.create_task(session.episode.reply(asked.messages, asked.tools, options, hear)))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _in_words(work: Callable[[], Awaitable[None]]) -> None:
    """What can be mended, or ends this episode, as a refusal."""
    try:
        await work()
    except EpisodeError as error:
        status = 403 if isinstance(error, BudgetSpent) else 400  # neither is asked again by clients
        raise Refusal(error.problem, remedy=error.remedy, status=status, code=error.reason) from None
    except EngineFull as error:
        raise Refusal(error.problem, remedy=error.remedy, status=429, code="engine_full") from None
    except SequenceFailed as error:
        raise Refusal(error.problem, remedy=error.remedy, status=500, code="sequence_failed") from None
    except RequestError as error:
        raise Refusal(error.problem, remedy=error.remedy) from None


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    known = ", ".join(f"/v1{path}" for path in (*PATHS, COUNT))
    problem = f"{request.method} is not for {path}" if error.status_code == 405 else f"there is nothing at {path}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    remedy = f"known: POST {known}; GET /v1/models"
    return Refusal(problem, remedy=remedy, status=error.status_code, code=code).response()
