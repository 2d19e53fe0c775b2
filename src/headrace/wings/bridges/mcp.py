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

import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headrace.base.errors import BudgetSpent, EnvError
from headrace.base.types.chat import Message, Tool, ToolCall
from headrace.rollout.environments.bridges import Bridge, Found
from headrace.rollout.environments.interface import as_messages
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.program import find_program

TIMEOUT_S = 60.0


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


class Tools:
    """The tools of one connection to an MCP server; made by :func:`connected`."""

    def __init__(self, client: Any, described: list[Tool]) -> None:
        """``client`` is the open connection, ``described`` the descriptions of the server's tools."""
        self._client = client
        self.described = described
        """The descriptions of the tools, for ``policy.chat(..., tools=...)``."""

    async def call(self, call: ToolCall) -> Message:
        """Execute a tool call of the model by the server, and return the result as a message for the conversation; an
        error of the tool, or arguments that are no JSON, become a message that says so."""
        from mcp import MCPError

        try:
            result = await self._client.call_tool(call.name, json.loads(call.arguments or "{}"))
        except (ValueError, MCPError) as error:
            return _tool_message(call, f"error: {error}", failed=True)
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return _tool_message(call, "\n".join(texts), failed=result.is_error)


@asynccontextmanager
async def connected(what: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Tools]:
    """Connect to the MCP server ``what`` (a URL or a command) for the body of ``async with``, and yield its tools.
    ``timeout_s`` is the longest wait for an answer, in seconds."""
    from mcp import Client, StdioServerParameters

    server: Any = what
    if "://" not in what:
        command = shlex.split(what)
        server = StdioServerParameters(command=find_program(command), args=command[1:])
    async with Client(server, read_timeout_seconds=timeout_s) as client:
        described: list[Tool] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            described += [
                Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        yield Tools(client, described)


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
