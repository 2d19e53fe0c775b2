"""The translation of Anthropic's messages protocol, ``POST /v1/messages`` and ``/v1/messages/count_tokens``. A message
is a list of content blocks. A block is text, thinking (the policy's reasoning), a call of a tool (``tool_use``), or the
result of a tool (``tool_result``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from headrace.base.net.refusal import Refusal
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import StopReason
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import ChatProtocol, EndpointRequest, ExchangeContext, Json, SseEvent
from headrace.wings.agents.reading import (  # fmt: skip
    INT32_MAX,
    NAME,
    BodyPart,
    json_object,
    make_text_validator,
    named_answers,
    refuse_same_names,
    set_fields,
)
from headrace.wings.serve.strict import StrictBody, read_body, read_stop

MALFORMED = "malformed_arguments"
"""The field that contains the text of a call's arguments if the policy wrote invalid JSON; the protocol requires an
object."""
UNSIGNED = "unsigned"
"""The signature of every reasoning block; clients send it back, and it is not checked."""

_Text = Annotated[str, PlainValidator(make_text_validator("text"))]
_ERRORS = {
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _TextBlock(BodyPart):
    """A block of text in a request."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: list[Any] = Field(default=[], max_length=0)


class _Thinking(BodyPart):
    """A block with reasoning of the policy, which the client sends back; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUse(BodyPart):
    """A block with a call of a tool that the policy made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    cache_control: Any = None

    def call(self) -> ToolCall:
        """Return the call in Headrace's form, with the arguments as the policy wrote them."""
        given = self.input.get(MALFORMED) if self.input.keys() == {MALFORMED} else None
        arguments = given if isinstance(given, str) else json.dumps(self.input, ensure_ascii=False)
        return ToolCall(id=self.id, name=self.name, arguments=arguments)


class _ToolResult(BodyPart):
    """A block with the result of a tool; ``is_error`` says that the tool failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Text = ""
    is_error: bool = False
    cache_control: Any = None

    def message(self) -> Message:
        """Return the result as a message in Headrace's form."""
        return Message(role="tool", content=self.content, tool_call_id=self.tool_use_id, failed=self.is_error)


def _as_blocks(value: object) -> object:
    """Return a plain text as a list of one text block, and any other content unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _MessagesInput(BodyPart):
    """A user's message in a request, which may contain results of tools."""

    role: Literal["user"]
    content: Annotated[
        list[Annotated[_TextBlock | _ToolResult, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ]

    def messages(self) -> Iterator[Message]:
        """Yield the message in Headrace's form: each tool result as a separate message, and the text between tool
        results as user messages."""
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, _TextBlock):
                texts.append(block.text)
                continue
            if texts:
                yield Message(role="user", content="".join(texts))
                texts = []
            yield block.message()
        if texts or not self.content:
            yield Message(role="user", content="".join(texts))


class _MessagesNote(BodyPart):
    """A system message in the middle of a conversation, which Claude Code sends."""

    role: Literal["system"]
    content: _Text

    def messages(self) -> Iterator[Message]:
        """Yield the message in Headrace's form."""
        yield Message(role="system", content=self.content)


class _MessagesAnswer(BodyPart):
    """A message of a request that the policy wrote earlier."""

    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[_TextBlock | _Thinking | _ToolUse, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ]

    def messages(self) -> Iterator[Message]:
        """Yield the message in Headrace's form, in which all blocks of one kind are joined."""
        yield Message(
            role="assistant",
            content="".join(block.text for block in self.content if isinstance(block, _TextBlock)),
            reasoning="".join(block.thinking for block in self.content if isinstance(block, _Thinking)),
            tool_calls=tuple(block.call() for block in self.content if isinstance(block, _ToolUse)),
        )


class _MessagesTool(BodyPart):
    """A tool that a request offers to the policy."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=NAME)
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False
    """Accepted for compatibility, without effect: nothing constrains the policy's output."""
    cache_control: Any = None
    eager_input_streaming: bool = False


def _read_choice(value: object) -> str:
    """Return the type of ``tool_choice``, ``auto`` or ``none``; other types are refused, since nothing can make the
    policy call a tool."""
    fields = {name: part for name, part in value.items() if part} if isinstance(value, dict) else {}
    if fields.keys() == {"type"} and fields["type"] in ("auto", "none"):
        return str(fields["type"])
    raise PydanticCustomError(
        "tool_choice",
        'expected {"type": "auto"} or {"type": "none"}: nothing makes the policy call a tool, or only one at a time',
    )


class _ThinkingConfig(BodyPart):
    """The setting of a request whether the answer contains the reasoning of the policy."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int = Field(default=0, ge=0)
    """Accepted without effect: nothing limits the policy's reasoning."""
    display: Literal["summarized", "omitted"] = "summarized"
    """``summarized`` shows the reasoning as it was sampled; it is never summarized."""

    @property
    def shown(self) -> bool:
        """Return whether the answer contains the reasoning."""
        return self.type != "disabled" and self.display != "omitted"


class _OutputConfig(BodyPart):
    """The effort setting of a request; it has no effect."""

    effort: str = ""


_ALL_THINKING_KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""A value of ``context_management`` that keeps the whole conversation, which Claude Code sends."""


class _MessagesPrompt(StrictBody):
    """The fields of a body for the conversation and the tools. A request for a count of tokens has only these
    fields."""

    ignored: ClassVar = frozenset({"metadata", "service_tier", "inference_geo", "cache_control", "diagnostics"})
    unsupported: ClassVar = {
        "container": (),
        "context_management": ({}, _ALL_THINKING_KEPT),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard",),
    }
    model: str = ""
    system: _Text = ""
    messages: list[Annotated[_MessagesInput | _MessagesNote | _MessagesAnswer, Field(discriminator="role")]] = Field(
        min_length=1
    )
    tools: list[_MessagesTool] = Field(default=[], max_length=1024)
    tool_choice: Annotated[str, PlainValidator(_read_choice)] = "auto"
    thinking: _ThinkingConfig = _ThinkingConfig(type="disabled")
    output_config: _OutputConfig = _OutputConfig()

    def read(self) -> tuple[Message, ...]:
        """Return the conversation in Headrace's form, with the system message first."""
        opening = [Message(role="system", content=self.system)] if self.system else []
        return named_answers([*opening, *(part for message in self.messages for part in message.messages())])

    def offered(self) -> tuple[Tool, ...]:
        """Return the tools that the policy may call, in Headrace's form; none if ``tool_choice`` is ``none``."""
        given = self.tools if self.tool_choice == "auto" else []
        tools = tuple(Tool(name=t.name, description=t.description, parameters=t.input_schema) for t in given)
        refuse_same_names(tools)
        return tools


class _MessagesBody(_MessagesPrompt):
    """The body of a request for an answer: the conversation, the tools, and the settings of the answer."""

    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: Annotated[tuple[str, ...], PlainValidator(read_stop)] = ()
    stream: bool = False
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=INT32_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessagesExchange:
    """A parsed request to ``/v1/messages``, with the translation of its answer."""

    body: _MessagesBody
    """The body as the client sent it."""
    request: EndpointRequest
    """The request to the policy, in Headrace's form."""
    context: ExchangeContext
    """The facts of the request beside its body."""

    def answer(self, replies: Sequence[Reply]) -> Json:
        """Return the body of the response; ``replies`` holds exactly one reply."""
        (reply,) = replies
        body = self.initial_body(reply.num_prompt_tokens)
        return {
            **body,
            "content": self._blocks(reply.message),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop or None,
            "usage": {**body["usage"], "output_tokens": reply.num_tokens},
        }

    def stream(self) -> _MessagesStream:
        """Return the object that translates the answer into server-sent events."""
        return _MessagesStream(self)

    def initial_body(self, num_prompt_tokens: int) -> Json:
        """Return the body of the response before it has content, with which a stream begins. ``num_prompt_tokens`` is
        the number of tokens of the prompt."""
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        return {
            "id": f"msg_{self.context.name}",
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
        }

    def _blocks(self, message: Message) -> list[Json]:
        """Return the content blocks of the policy's ``message``. Reasoning is included only if the request asks for it,
        since other clients expect the text in the first block."""
        blocks: list[Json] = []
        if message.reasoning and self.body.thinking.shown:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": UNSIGNED})
        if message.content or not (blocks or message.tool_calls):
            blocks.append({"type": "text", "text": message.content, "citations": None})
        for call in message.tool_calls:
            given = json_object(call.arguments)
            arguments = {MALFORMED: call.arguments} if given is None else given
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return blocks


class _MessagesStream:
    """A translator of one answer into server-sent events. The blocks are streamed in the order reasoning, text, calls
    of tools."""

    def __init__(self, exchange: _MessagesExchange) -> None:
        """Create a translator of the answer to ``exchange`` that has sent no events."""
        self._exchange = exchange
        self._has_started = False
        """Whether the event that begins the message has been sent."""
        self._index = -1
        """Index of the last opened block; −1 before the first."""
        self._open_type = ""
        """Type of the open block, whose index is ``_index``; empty if no block is open."""

    def add(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """Yield the events that stream one piece of the answer, in a block of reasoning or of text. ``choice`` is the
        number of the answer, always 0."""
        yield from self._begin(piece.num_prompt_tokens)
        if piece.reasoning and self._exchange.body.thinking.shown:
            yield from self._open_block({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=piece.reasoning)
        if piece.content:
            yield from self._open_block({"type": "text", "text": "", "citations": None})
            yield self._delta(type="text_delta", text=piece.content)

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """Yield the events that end the stream: the blocks that have not been streamed, such as calls of tools, and the
        stop reason. ``replies`` holds exactly one reply."""
        whole = self._exchange.answer(replies)
        yield from self._begin(replies[0].num_prompt_tokens)
        for block in whole["content"][self._index + 1 :]:
            blank: Json = {"text": ""} if block["type"] == "text" else {"input": {}}
            yield from self._open_block({**block, **blank}, always=True)
            if block["type"] == "tool_use":
                yield self._delta(type="input_json_delta", partial_json=json.dumps(block["input"], ensure_ascii=False))
        yield from self._close_block()
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=whole["usage"])
        yield _event("message_stop")

    def _begin(self, num_prompt_tokens: int) -> Iterator[SseEvent]:
        """Yield the event that begins the message, unless it has been sent."""
        if not self._has_started:
            self._has_started = True
            yield _event("message_start", message=self._exchange.initial_body(num_prompt_tokens))

    def _open_block(self, blank: Json, *, always: bool = False) -> Iterator[SseEvent]:
        """Yield the events that open the empty block ``blank``. Without ``always``, yield nothing if a block of its
        type is open."""
        if self._open_type == blank["type"] and not always:
            return
        yield from self._close_block()
        self._index, self._open_type = self._index + 1, blank["type"]
        yield _event("content_block_start", index=self._index, content_block=blank)

    def _delta(self, **delta: str) -> SseEvent:
        """Return the event that adds ``delta`` to the open block."""
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close_block(self) -> Iterator[SseEvent]:
        """Yield the events that close the open block, if there is one."""
        if self._open_type == "thinking":
            yield self._delta(type="signature_delta", signature=UNSIGNED)
        if self._open_type:
            yield _event("content_block_stop", index=self._index)
        self._open_type = ""


def _stop_reason(reply: Reply) -> str:
    """Return the protocol's ``stop_reason`` of an answer."""
    if reply.stop_reason is not StopReason.STOP:
        return "max_tokens"  # the protocol has no value for a deadline or a withdrawn request
    if reply.stop:
        return "stop_sequence"
    return "tool_use" if reply.message.tool_calls else "end_turn"


def _event(kind: str, **fields: Any) -> SseEvent:
    """Return an event of the type ``kind`` with these fields."""
    return SseEvent(kind, {"type": kind, **fields})


def _parse(tree: Mapping[str, Any], context: ExchangeContext) -> _MessagesExchange:
    """Parse the body ``tree`` of a request to ``/v1/messages``, and return its exchange. Raises :class:`Refusal` if the
    last message is the assistant's. ``context`` has the facts of the request beside its body."""
    body = read_body(_MessagesBody, tree)
    if body.messages[-1].role == "assistant":
        raise Refusal(
            "the last message is the assistant's, and an answer that someone else has begun is not continued",
            remedy="end the messages with what the policy is to answer",
            param="messages",
        )
    request = EndpointRequest(
        messages=body.read(),
        tools=body.offered(),
        options=ChatOptions(max_new_tokens=body.max_tokens, stop=body.stop_sequences),
        stream=body.stream,
        ignored=set_fields(
            **{"output_config.effort": body.output_config.effort},
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
        ),
    )
    return _MessagesExchange(body=body, request=request, context=context)


def read_counted(tree: Mapping[str, Any]) -> EndpointRequest:
    """Parse the body ``tree`` of a ``count_tokens`` request; only its messages and tools are used."""
    body = read_body(_MessagesPrompt, tree)
    return EndpointRequest(messages=body.read(), tools=body.offered(), options=ChatOptions())


def _refusal(refusal: Refusal) -> Json:
    """Return the JSON body of an error response, in the protocol's format."""
    kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{refusal.problem}; {refusal.remedy}"}}


MESSAGES = ChatProtocol(
    parse=_parse,
    refusal=_refusal,
    broken=lambda refusal: SseEvent("error", _refusal(refusal)),
    ping=b'event: ping\ndata: {"type": "ping"}\n\n',
)
