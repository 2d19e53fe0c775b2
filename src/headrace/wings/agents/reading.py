"""The parsing of request bodies that all protocols share: pydantic models for parts of bodies, with methods that
convert them to Headrace's messages, tools and calls. Unknown fields are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.chat import Message, Reply, Tool, ToolCall
from headrace.wings.serve.strict import Strict

INT32_MAX = 2**31 - 1
"""The largest integer in a request's fields."""
NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
"""Pattern of the names of offered tools. The policy may write calls of other names."""
HARMLESS = frozenset({"annotations", "cache_control", "citations", "logprobs", "parsed", "prompt_cache_breakpoint"})
"""Keys of text parts that do not change the text; they are ignored."""


class BodyPart(Strict):
    """A base class for models of parts of a body. A field that is ``null`` counts as absent."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        """Return an object without the fields that are ``null``."""
        if not isinstance(value, dict):
            return value
        return {name: part for name, part in value.items() if part is not None}


class CalledFunction(BodyPart):
    """The function and the arguments (JSON text) of a tool call in a request."""

    name: str = Field(min_length=1)
    arguments: str = ""
    parsed_arguments: Any = None
    """Added by OpenAI's client; not read."""


class ChatToolCall(BodyPart):
    """A call of a tool in an earlier message of the policy, in OpenAI's chat completions."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0
    """Not used. Messages that a program has joined from the deltas of a stream contain it."""

    def call(self) -> ToolCall:
        """Return the call in Headrace's form."""
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


class OfferedFunction(BodyPart):
    """The function of an offered tool: its name, its description and the JSON schema of its parameters."""

    name: str = Field(pattern=NAME)
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False
    """Accepted for compatibility, without effect on calls that the model chooses to make."""


class ChatTool(BodyPart):
    """A tool that a request offers to the policy, in OpenAI's chat completions."""

    type: Literal["function"]
    function: OfferedFunction

    def tool(self) -> Tool:
        """Return the tool in Headrace's form."""
        function = self.function
        return Tool(name=function.name, description=function.description, parameters=function.parameters)


def make_text_validator(*kinds: str) -> Callable[[object], str]:
    """Return a validator for a field of a pydantic model. It accepts a text, or a list of text parts of the given
    ``kinds``, which it joins to one text."""
    words = f'expected a text, or a list of {{"type": "{kinds[0]}", "text": ...}}: the policy reads text alone'

    def read(value: object) -> str:
        """Return the text of a message's content, which is a string or a list of text parts."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise PydanticCustomError("content", words)
        return "".join(map(read_part, value))

    def read_part(part: object) -> str:
        """Return the text of one part. Raises an error of validation for a part that is not text."""
        fields = part if isinstance(part, dict) and part.keys() <= {"type", "text"} | HARMLESS else {}
        if fields.get("type") in kinds and isinstance(text := fields.get("text"), str):
            return text
        raise PydanticCustomError("content", words)

    return read


def read_choice(value: object) -> str:
    """Return the value of OpenAI's ``tool_choice``, ``auto`` or ``none``; other values are refused, since nothing can
    make the policy call a tool."""
    if value in ("auto", "none"):
        return str(value)
    raise PydanticCustomError("tool_choice", "expected 'auto' or 'none': nothing makes the policy call a tool")


def set_fields(**fields: float | str | None) -> dict[str, float | str]:
    """Return the ``fields`` whose value is neither ``None`` nor empty."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def named_answers(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return ``messages`` with the name of the tool added to every tool result, since the protocols send only the id of
    the call. Raises :class:`Refusal` for the result of a call that is in no earlier message."""
    tools: dict[str, str] = {}
    read: list[Message] = []
    for message in messages:
        tools |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool":
            if message.tool_call_id not in tools:
                raise Refusal(
                    f"a tool's answer names the call {excerpt(message.tool_call_id)}, which no message before it makes",
                    remedy="send the assistant's message with that call before its answer",
                    code="unknown_tool_call",
                )
            message = _with_tool_name(message, tools[message.tool_call_id])  # noqa: PLW2901 - the same message, complete
        read.append(message)
    return tuple(read)


def _with_tool_name(message: Message, name: str) -> Message:
    """Return a copy of the tool result ``message`` with the tool's name."""
    return Message(
        role="tool", content=message.content, tool_call_id=message.tool_call_id, name=name, failed=message.failed
    )


def refuse_same_names(tools: Sequence[Tool]) -> None:
    """Raise :class:`Refusal` if two tools have the same name, since a call could not be assigned to one of them."""
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise Refusal(
                f"two tools are called {excerpt(name)}", remedy="give each tool a name of its own", param="tools"
            )


def token_logprobs(reply: Reply, spell: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the sampled tokens of ``reply`` with their logprobs, in the form that both of OpenAI's protocols use; a
    logprob that is not finite is ``null``. ``spell`` returns the text of a token."""
    return [
        {**logprob_entry(spell(token), logprob if math.isfinite(logprob) else None), "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]


def logprob_entry(token: str, logprob: float | None) -> dict[str, Any]:
    """Return a token and its log-probability in OpenAI's format, with the bytes of its text; the bytes of a token that
    is only a part of a character are ``None``."""
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}


def encode_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as JSON in the format of chat completions."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def json_object(text: str) -> dict[str, Any] | None:
    """Parse ``text`` as a JSON object; return ``None`` if it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
