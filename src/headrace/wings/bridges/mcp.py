"""The bridge to the tools of an MCP server: ``env.entry = "mcp/python my_tools.py"`` (a command that communicates over
its standard input and output) or ``"mcp/http://127.0.0.1:8000/mcp"``. With MCP, the Model Context Protocol, a model can
call tools of other programs.

The model receives the row's prompt and calls tools until one of its answers has no call; ``env.reward`` scores that
answer. Every episode opens its own connection; a server that is a command runs as a separate process for each episode.
``env.options``:

    system      system prompt that comes before the row's prompt
    timeout_s   longest wait for one answer of the server, in seconds (60)

A user-written rollout function gets the tools from ``async with connected(what) as tools``.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

from headrace.base.errors import BudgetSpent, EnvError, EpisodeError
from headrace.base.types.chat import Message, Tool, ToolCall
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.interface import as_messages
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.program import find_program

TIMEOUT_S = 60.0
MAX_PAGES = 100
"""Largest number of pages of a server's list of tools."""


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a rollout function, which runs one episode: the model answers the row's prompt, and may call the tools of
    the server ``what`` (a URL or a command). ``options`` are ``env.options``. Raises
    :class:`~headrace.base.errors.EnvError` for an unknown option."""
    system, timeout_s = str(options.pop("system", "")), float(options.pop("timeout_s", TIMEOUT_S))
    if options:
        raise EnvError(f"env.options.{min(options)} is unknown", remedy="known are system and timeout_s")
    if "://" not in what:
        find_program(shlex.split(what))

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Run one episode: the policy answers, and its tool calls are executed, until an answer has no call."""
        messages = [Message(role="system", content=system)] if system else []
        messages += as_messages(task["prompt"])
        async with connected(what, timeout_s) as tools:
            await _call_tools_until_answer(messages, tools, policy)
        return Episode()

    return rollout


async def _call_tools_until_answer(messages: list[Message], tools: Tools, policy: EpisodePolicy) -> None:
    """Request answers of the model and execute their tool calls, until an answer has no call or the token budget is
    spent. Answers and results are appended to ``messages``. Raises :class:`~headrace.base.errors.BudgetSpent` only if
    the budget is spent before the first answer. ``policy`` is the model, and ``tools`` are those that it may call."""
    answered = False
    while True:
        try:
            reply = await policy.chat(messages, tools=tools.described)
        except BudgetSpent:
            if not answered:
                raise
            return
        answered = True
        messages.append(reply.message)
        if not reply.message.tool_calls:
            return
        messages += [await tools.call(call) for call in reply.message.tool_calls]


class LineChannel(ABC):
    """A channel to an MCP server without a continuous connection, such as a server in a sandbox. The server's lines are
    fetched in exchanges, one after another."""

    error: EpisodeError | None = None
    """The error after which no more exchanges are possible; ``None`` while the channel works."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a request. The limits of time and size apply to all exchanges of the request together."""

    @abstractmethod
    async def exchange(self, line: bytes, *, waits: bool) -> list[bytes]:
        """Send ``line`` unless it is empty, and return the complete lines that the server has written, which may be
        none. With ``waits``, first wait until the server has written output. Raises
        :class:`~headrace.base.errors.EpisodeError` if the server exceeds the limits, or has ended."""


class Tools:
    """The tools of one connection to an MCP server; :func:`connected` yields them."""

    def __init__(self, client: Any, described: list[Tool], channel: LineChannel | None = None) -> None:
        """Create the tools of the open connection ``client``, with their descriptions ``described``. ``channel`` is the
        channel of the connection, if it uses a :class:`LineChannel`."""
        self._client = client
        self._channel = channel
        self.described = described
        """The descriptions of the tools, for ``policy.chat(..., tools=...)``."""

    async def call(self, call: ToolCall) -> Message:
        """Send a tool call of the model to the server, and return the result as a message for the conversation. An
        error of the tool, or arguments that are not JSON, are returned as a message with the error. Raises
        :class:`~headrace.base.errors.EpisodeError` if the channel to the server fails."""
        from mcp import MCPError

        try:
            result = await self._client.call_tool(call.name, json.loads(call.arguments or "{}"))
        except (ValueError, MCPError) as error:
            if self._channel is not None and self._channel.error is not None:
                raise self._channel.error from None
            return _tool_message(call, f"error: {error}", failed=True)
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return _tool_message(call, "\n".join(texts), failed=result.is_error)


def _import_client() -> None:
    """Import the modules that a connection needs."""
    for name in ("anyio", "mcp.shared.message"):
        import_module(name)


@asynccontextmanager
async def connected(what: str | LineChannel, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Tools]:
    """Connect to the MCP server ``what`` (a URL, a command or a channel) for the body of ``async with``, and yield its
    tools. ``timeout_s`` is the longest wait for an answer, in seconds."""
    await asyncio.to_thread(_import_client)  # takes a second or more, during which other episodes continue
    from mcp import Client, StdioServerParameters

    server: Any = what
    if isinstance(what, LineChannel):
        server = _channel_streams(what)
    elif "://" not in what:
        command = shlex.split(what)
        server = StdioServerParameters(command=find_program(command), args=command[1:])
    async with Client(server, read_timeout_seconds=timeout_s) as client:
        yield Tools(client, await _list_tools(client), what if isinstance(what, LineChannel) else None)


async def _list_tools(client: Any) -> list[Tool]:
    """Return the descriptions of a server's tools, from all pages of its list, which ``client`` requests. Raises
    :class:`~headrace.base.errors.EpisodeError` if the list does not end."""
    described: list[Tool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        described += [
            Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return described
    raise EpisodeError(
        f"an MCP server lists its tools on more than {MAX_PAGES} pages",
        remedy="have it offer fewer tools, and end their list",
    )


@asynccontextmanager
async def _channel_streams(channel: LineChannel) -> AsyncIterator[tuple[Any, Any]]:
    """Yield (stream from which a client reads, stream to which it writes), and forward its messages over ``channel``
    while the body runs."""
    import anyio

    to_client, client_reads = anyio.create_memory_object_stream[Any](0)
    client_writes, from_client = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as group:
        group.start_soon(_ChannelForwarder(channel, from_client, to_client).run)
        try:
            yield client_reads, client_writes
        finally:
            group.cancel_scope.cancel()


class _ChannelForwarder:
    """A forwarder of messages between one client and the server of a channel. It tracks unanswered requests of both
    sides to decide whether the next exchange sends a message or only waits for the server."""

    def __init__(self, channel: LineChannel, from_client: Any, to_client: Any) -> None:
        """Create the forwarder. ``from_client`` is the stream of the client's messages, and ``to_client`` the stream of
        messages for the client."""
        self._channel = channel
        self._from_client = from_client
        self._to_client = to_client
        self._client_requests: set[str] = set()
        """Unanswered requests of the client."""
        self._server_requests: set[str] = set()
        """Unanswered requests of the server, which may delay its answers."""

    async def run(self) -> None:
        """Forward messages until the client closes its streams or the channel fails. After a failure, the streams are
        closed, which the client receives as the end of its connection."""
        import anyio

        async with self._from_client, self._to_client:
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while self._channel.error is None:
                    await self._exchange()

    async def _exchange(self) -> None:
        """Make one exchange: send the client's next message, unless the client only waits for answers of the server,
        and forward the server's messages to the client."""
        from mcp.shared.message import SessionMessage

        line = await self._next_line() if self._server_requests or not self._client_requests else b""
        try:
            lines = await self._channel.exchange(line, waits=bool(self._client_requests) and not self._server_requests)
        except EpisodeError as error:
            self._channel.error = error
            return
        for message in filter(None, map(_parse_message, lines)):
            self._track_request(message, self._server_requests, self._client_requests)
            await self._to_client.send(SessionMessage(message))

    async def _next_line(self) -> bytes:
        """Wait for the client's next message, and return it as a line."""
        message = (await self._from_client.receive()).message
        if self._track_request(message, self._client_requests, self._server_requests):
            self._channel.begin()
        return bytes(message.model_dump_json(by_alias=True, exclude_unset=True).encode()) + b"\n"

    @staticmethod
    def _track_request(message: Any, own: set[str], others: set[str]) -> bool:
        """Update the unanswered requests of both sides for a message, and return whether the message is a request. A
        request is added to ``own``, the requests of its sender; an answer removes its request from ``others``, the
        requests of the receiver."""
        from mcp import types

        if isinstance(message, types.JSONRPCRequest):
            own.add(str(message.id))
            return True
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            others.discard(str(message.id))
        return False


def _parse_message(line: bytes) -> Any:
    """Return the message in a line of a server; ``None`` for a line without a message, such as a line of a log."""
    from mcp import types

    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _tool_message(call: ToolCall, text: str, *, failed: bool) -> Message:
    """Return the result of a tool call as a message for the conversation. ``failed``: the tool has reported an
    error."""
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name, failed=failed)


BRIDGE = Bridge(
    make=make,
    example="mcp/python my_tools.py",
    package="mcp",
    install="'headrace[mcp]'",
)
