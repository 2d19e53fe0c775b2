"""The bridge to the tools of an MCP server: ``env.entry = "mcp/python my_tools.py"`` (a command that talks over its
standard input and output) or ``"mcp/http://127.0.0.1:8000/mcp"``. MCP, the Model Context Protocol, lets a model call
tools of other programs.

The model reads the row's prompt and calls tools until it answers without a call; ``env.reward`` scores that answer.
Every episode opens its own connection; a server given as a command runs as a separate process per episode.
``env.options``:

    system      system prompt that comes before the row's prompt
    timeout_s   longest wait for one answer of the server, in seconds (60)

Your own rollout function gets the tools from ``async with connected(what) as tools``.
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
from headrace.rollout.environments.bridges import Bridge, Found
from headrace.rollout.environments.interface import as_messages
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.program import find_program

TIMEOUT_S = 60.0
MAX_PAGES = 100
"""The most pages of a list of tools."""


def make(what: str, options: dict[str, Any]) -> Found:
    """Return a rollout function, which runs one episode: the model answers the row's prompt with the tools of the
    server ``what``, a URL or a command. ``options`` are ``env.options``. Raises :class:`~headrace.base.errors.EnvError`
    for an unknown option."""
    system, timeout_s = str(options.pop("system", "")), float(options.pop("timeout_s", TIMEOUT_S))
    if options:
        raise EnvError(f"env.options.{min(options)} is unknown", remedy="known are system and timeout_s")
    if "://" not in what:
        find_program(shlex.split(what))

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Run one episode: the policy answers and calls the server's tools until an answer has no call."""
        messages = [Message(role="system", content=system)] if system else []
        messages += as_messages(task["prompt"])
        async with connected(what, timeout_s) as tools:
            await _call_tools_until_answer(messages, tools, policy)
        return Episode()

    return rollout


async def _call_tools_until_answer(messages: list[Message], tools: Tools, policy: EpisodePolicy) -> None:
    """Let the model answer, and execute its tool calls, until an answer has no call or its token budget is spent;
    ``messages`` grows by all of it. Raises :class:`~headrace.base.errors.BudgetSpent` only if not even one answer
    fitted the budget."""
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
    """A way to an MCP server that cannot be listened to all the time, such as one in a sandbox: the server's lines are
    fetched in exchanges, one after the other."""

    error: EpisodeError | None = None
    """Why there are no more exchanges; ``None`` while there are."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a request: limits of time and size count for all of its exchanges together."""

    @abstractmethod
    async def exchange(self, line: bytes, *, waits: bool) -> list[bytes]:
        """Send a line, unless it is empty. If ``waits``, wait until the server has written something, and return the
        lines that are complete, which may be none. Raises :class:`~headrace.base.errors.EpisodeError` if the server
        does not keep to the limits, or has ended."""


class Tools:
    """The tools of one connection to an MCP server; made by :func:`connected`."""

    def __init__(self, client: Any, described: list[Tool], channel: LineChannel | None = None) -> None:
        """``client`` is the open connection, ``described`` the descriptions of the server's tools; ``channel`` is the
        way to the server, if it has one of its own."""
        self._client = client
        self._channel = channel
        self.described = described
        """The descriptions of the tools, for ``policy.chat(..., tools=...)``."""

    async def call(self, call: ToolCall) -> Message:
        """Execute a tool call of the model by the server, and return the result as a message for the conversation; an
        error of the tool, or arguments that are no JSON, become a message that says so. Raises
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
    """Import what a connection needs."""
    for name in ("anyio", "mcp.shared.message"):
        import_module(name)


@asynccontextmanager
async def connected(what: str | LineChannel, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Tools]:
    """Connect to the MCP server ``what`` (a URL, a command or a channel) for the body of ``async with``, and yield its
    tools. ``timeout_s`` is the longest wait for an answer, in seconds."""
    await asyncio.to_thread(_import_client)  # takes a second or more, in which other episodes go on
    from mcp import Client, StdioServerParameters

    server: Any = what
    if isinstance(what, LineChannel):
        server = _streams(what)
    elif "://" not in what:
        command = shlex.split(what)
        server = StdioServerParameters(command=find_program(command), args=command[1:])
    async with Client(server, read_timeout_seconds=timeout_s) as client:
        yield Tools(client, await _described(client), what if isinstance(what, LineChannel) else None)


async def _described(client: Any) -> list[Tool]:
    """Return the descriptions of a server's tools, from all pages of its list. Raises
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
async def _streams(channel: LineChannel) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams that a client reads from and writes to, and carry its messages over ``channel``."""
    import anyio

    heard, reads = anyio.create_memory_object_stream[Any](0)
    writes, written = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as group:
        group.start_soon(_Carrier(channel, written, heard).run)
        try:
            yield reads, writes
        finally:
            group.cancel_scope.cancel()


class _Carrier:
    """What carries the messages of one client over a channel."""

    def __init__(self, channel: LineChannel, written: Any, heard: Any) -> None:
        """``written`` is the stream of what the client writes, ``heard`` that of what it is to read."""
        self._channel = channel
        self._written = written
        self._heard = heard
        self._asked: set[str] = set()  # requests of the client
        self._asking: set[str] = set()  # requests of the server, which may wait for these before it answers

    async def run(self) -> None:
        """Carry messages until the client leaves, or the channel fails, which the client sees as the end of its
        connection."""
        import anyio

        async with self._written, self._heard:
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while self._channel.error is None:
                    await self._exchange()

    async def _exchange(self) -> None:
        """Send the client's next message, unless only an answer to it is missing, and pass on what the server says."""
        from mcp.shared.message import SessionMessage

        line = await self._next_line() if self._asking or not self._asked else b""
        try:
            lines = await self._channel.exchange(line, waits=bool(self._asked) and not self._asking)
        except EpisodeError as error:
            self._channel.error = error
            return
        for said in filter(None, map(_parsed, lines)):
            self._note(said, self._asking, self._asked)
            await self._heard.send(SessionMessage(said))

    async def _next_line(self) -> bytes:
        """Return the client's next message as a line."""
        message = (await self._written.receive()).message
        if self._note(message, self._asked, self._asking):
            self._channel.begin()
        return bytes(message.model_dump_json(by_alias=True, exclude_unset=True).encode()) + b"\n"

    @staticmethod
    def _note(message: Any, own: set[str], others: set[str]) -> bool:
        """Add a request to those of its side, or take the one that a message answers from those of the other side.
        Return whether it is a request."""
        from mcp import types

        if isinstance(message, types.JSONRPCRequest):
            own.add(str(message.id))
            return True
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            others.discard(str(message.id))
        return False


def _parsed(line: bytes) -> Any:
    """Return the message in a line of a server; ``None`` for a line that holds none, such as one of a log."""
    from mcp import types

    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None


def _tool_message(call: ToolCall, text: str, *, failed: bool) -> Message:
    """Return the result of a tool call as a message for the conversation; ``failed`` says that the tool reported an
    error."""
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name, failed=failed)


BRIDGE = Bridge(
    make=make,
    example="mcp/python my_tools.py",
    package="mcp",
    install="'headrace[mcp]'",
)
