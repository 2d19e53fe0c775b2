"""Tools of an MCP server: ``env.entry = "mcp/python my_tools.py"`` (a command, over its standard input and output) or
``"mcp/http://127.0.0.1:8000/mcp"``.

The model reads the row's prompt and calls the tools until it answers without a call; ``env.reward`` scores that answer.
Every episode has a connection of its own, and a server that is a command is a process of its own. ``env.options``:

system      what the model reads before the prompt
timeout_s   longest wait for an answer of the server (60)

A rollout function of yours takes the tools by ``async with connected(what) as tools``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from headrace.base.errors import BudgetSpent, EnvError
from headrace.base.types.chat import Message, Tool, ToolCall
from headrace.rollout.environments.interface import as_messages
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.program import find_program
from headrace.wings.bridges.base import Found

TIMEOUT_S = 60.0


def make(what: str, options: dict[str, Any]) -> Found:
    """The row's prompt, with the tools of the server ``what``."""
    system, timeout_s = str(options.pop("system", "")), float(options.pop("timeout_s", TIMEOUT_S))
    if options:
        raise EnvError(f"env.options.{min(options)} is unknown", remedy="known are system and timeout_s")
    if "://" not in what:
        find_program(shlex.split(what))

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        said = [Message(role="system", content=system)] if system else []
        said += as_messages(task["prompt"])
        async with connected(what, timeout_s) as tools:
            await _until_it_answers(said, tools, policy)
        return Episode()

    return rollout


async def _until_it_answers(said: list[Message], tools: Tools, policy: EpisodePolicy) -> None:
    """Ask, and call what is asked for; a budget that is spent ends that, too."""
    answered = False
    while True:
        try:
            reply = await policy.chat(said, tools=tools.described)
        except BudgetSpent:
            if not answered:
                raise
            return
        answered = True
        said.append(reply.message)
        if not reply.message.tool_calls:
            return
        said += [await tools.call(call) for call in reply.message.tool_calls]


class Tools:
    """The tools of one connection."""

    def __init__(self, client: Any, described: list[Tool]) -> None:
        self._client = client
        self.described = described
        """For ``policy.chat(..., tools=...)``."""

    async def call(self, call: ToolCall) -> Message:
        """What the server answers to a call of the model, to be appended to the messages; its refusals too."""
        from mcp import MCPError

        try:
            result = await self._client.call_tool(call.name, json.loads(call.arguments or "{}"))
        except (ValueError, MCPError) as error:
            return _answer(call, f"error: {error}", failed=True)
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        return _answer(call, "\n".join(texts), failed=result.is_error)


@asynccontextmanager
async def connected(what: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Tools]:
    """The tools of the server ``what`` for the body's duration."""
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


def _answer(call: ToolCall, text: str, *, failed: bool) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name, failed=failed)
