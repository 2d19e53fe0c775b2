"""The translation of OpenAI's responses protocol, ``POST /v1/responses``. The input of a request and the output of a
response are lists of items. An item is a message, reasoning of the policy, a function call, or a function's output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import StopReason
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import ChatProtocol, EndpointRequest, ExchangeContext, Json, SseEvent
from headrace.wings.agents.reading import (  # fmt: skip
    INT32_MAX,
    NAME,
    BodyPart,
    make_text_validator,
    named_answers,
    read_choice,
    refuse_same_names,
    set_fields,
    token_logprobs,
)
from headrace.wings.serve.strict import StrictBody, read_body

_Text = Annotated[str, PlainValidator(make_text_validator("input_text", "output_text"))]
_Status = Literal["in_progress", "completed", "incomplete"]
_LOGPROBS = "message.output_text.logprobs"


class _MessageItem(BodyPart):
    """An item of a request with a message of the policy (``assistant``) or of another author."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text
    id: str = ""
    status: _Status = "completed"
    phase: str = ""
    """The phase of an assistant's message. It has no effect."""


class _ReasoningItem(BodyPart):
    """An item of a request with reasoning that the policy wrote earlier."""

    type: Literal["reasoning"]
    content: Annotated[str, PlainValidator(make_text_validator("reasoning_text"))] = ""
    id: str = ""
    summary: list[Any] = Field(default=[], max_length=0)
    encrypted_content: Literal[""] = ""
    status: _Status = "completed"


class _FunctionCallItem(BodyPart):
    """An item of a request with a call of a function that the policy made earlier."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1)
    arguments: str = ""
    parsed_arguments: Any = None
    """Added by OpenAI's client; not read."""
    id: str = ""
    status: _Status = "completed"


class _FunctionOutputItem(BodyPart):
    """An item of a request with the output of a function that was called."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text
    id: str = ""
    name: str = ""
    """Not used: the function's name is taken from the call."""
    status: _Status = "completed"


def _item_type(item: object) -> str:
    """Return the type of ``item``; an item without a type is a message."""
    return str(item.get("type") or "message") if isinstance(item, dict) else "message"


_Item = Annotated[
    Annotated[_MessageItem, Tag("message")]
    | Annotated[_ReasoningItem, Tag("reasoning")]
    | Annotated[_FunctionCallItem, Tag("function_call")]
    | Annotated[_FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_item_type),
]


def _as_items(value: object) -> object:
    """Return a plain text as a list of one user message, and any other input unchanged."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _ResponsesTool(BodyPart):
    """A function that a request offers to the policy."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = True
    """Accepted for compatibility, without effect on calls that the model chooses to make."""

    def tool(self) -> Tool:
        """Return the tool in Headrace's form."""
        return Tool(name=self.name, description=self.description, parameters=self.parameters)


class _Reasoning(BodyPart):
    """The reasoning settings of a request; they have no effect."""

    effort: str = ""
    summary: str = ""
    """Accepted without effect: reasoning is shown as it was sampled."""


class _Format(BodyPart):
    """The format of the answer: plain text only."""

    type: Literal["text"]


class _TextConfig(BodyPart):
    """The settings of a request for the text of the answer."""

    format: _Format = _Format(type="text")
    verbosity: str = ""


class ResponsesBody(StrictBody):
    """The body of ``POST /v1/responses``. ``ignored`` and ``unsupported`` list fields that have no effect and fields
    that are refused, the latter with the values that are accepted."""

    ignored: ClassVar = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "max_tool_calls"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            "client_metadata",
        }
    )
    unsupported: ClassVar = {
        "parallel_tool_calls": (True,),
        "background": (False,),
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    model: str = ""
    input: Annotated[list[_Item], BeforeValidator(_as_items)] = Field(default=[])
    instructions: str = ""
    previous_response_id: str = ""
    reasoning: _Reasoning = _Reasoning()
    text: _TextConfig = _TextConfig()
    tools: list[_ResponsesTool] = Field(default=[], max_length=1024)
    tool_choice: Annotated[str, PlainValidator(read_choice)] = "auto"
    stream: bool = False
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default=[], max_length=16
    )
    """Further outputs that the request asks for. Logprobs are included; the request for encrypted reasoning has no
    effect."""

    def opening(self) -> tuple[Message, ...]:
        """Return the system message with the instructions; empty if there are no instructions."""
        return (Message(role="system", content=self.instructions),) if self.instructions else ()

    def conversation(self, histories: Mapping[str, tuple[Message, ...]]) -> tuple[Message, ...]:
        """Return the messages up to this request: the messages of the response that the request continues, from
        ``histories`` by the response's id, and the messages of the input. Instructions are left out, since later
        responses do not inherit them. Raises :class:`Refusal` for an unknown response, and if there is no message at
        all."""
        before: tuple[Message, ...] = ()
        if self.previous_response_id:
            if self.previous_response_id not in histories:
                raise Refusal(
                    f"previous_response_id={excerpt(self.previous_response_id)} is not a response of this episode",
                    remedy="name a response of this key, or send the whole conversation as input",
                    param="previous_response_id",
                    status=404,
                    code="previous_response_not_found",
                )
            before = histories[self.previous_response_id]
        if not self.input and not before:
            raise Refusal("input is missing", remedy="give input", param="input", code="missing_required_parameter")
        return named_answers((*before, *_messages(self.input)))


def _messages(
    items: Sequence[_MessageItem | _ReasoningItem | _FunctionCallItem | _FunctionOutputItem],
) -> Iterator[Message]:
    """Yield the messages of ``items`` in Headrace's form. Consecutive items of reasoning, text and calls, in this
    order, are joined to one message of the policy."""
    places: list[int] = []  # places of the items that have been collected for one message
    parts: list[_MessageItem | _ReasoningItem | _FunctionCallItem] = []
    for item in items:
        place = _place_in_message(item)
        # a message has one reasoning and one text, but may have several calls
        if places and (place is None or place < places[-1] or place == places[-1] < 2):
            yield _join_items(parts)
            places, parts = [], []
        match item:
            case _MessageItem() | _ReasoningItem() | _FunctionCallItem() if place is not None:
                places.append(place)
                parts.append(item)
            case _MessageItem():
                role = "system" if item.role == "developer" else item.role
                yield Message(role=role, content=item.content)
            case _FunctionOutputItem():
                yield Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if parts:
        yield _join_items(parts)


def _place_in_message(item: _MessageItem | _ReasoningItem | _FunctionCallItem | _FunctionOutputItem) -> int | None:
    """Return the rank of ``item`` in the order of a message of the policy: 0 for reasoning, 1 for text, 2 for calls;
    ``None`` for an item that the policy did not write."""
    match item:
        case _ReasoningItem():
            return 0
        case _MessageItem(role="assistant"):
            return 1
        case _FunctionCallItem():
            return 2
    return None


def _join_items(parts: Sequence[_MessageItem | _ReasoningItem | _FunctionCallItem]) -> Message:
    """Join the items ``parts`` to one message of the policy."""
    calls = (part for part in parts if isinstance(part, _FunctionCallItem))
    return Message(
        role="assistant",
        content="".join(part.content for part in parts if isinstance(part, _MessageItem)),
        reasoning="".join(part.content for part in parts if isinstance(part, _ReasoningItem)),
        tool_calls=tuple(ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in calls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseForm:
    """A builder of the JSON of one response, whole or streamed, from its request and the policy's reply."""

    body: ResponsesBody
    """The body of the request."""
    context: ExchangeContext
    """The facts of the request beside its body."""
    own: Json = field(default_factory=dict)
    """Fields of the response, with their values, that replace the fields derived from the request's body."""

    @property
    def id(self) -> str:
        """Return the id of the response."""
        return f"resp_{self.context.name}"

    def stream(self, answer: Callable[[Sequence[Reply]], Json]) -> ItemEventStream:
        """Return the object that translates the answer into server-sent events. The function ``answer`` returns the
        complete body of the response for the replies."""
        return ItemEventStream(name=self.context.name, initial_body=self.initial_body(), final_body=answer)

    def initial_body(self) -> Json:
        """Return the body of the response before it has output, with which a stream begins."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.context.created_s,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.body.instructions or None,
            "max_output_tokens": self.body.max_output_tokens,
            "metadata": {},
            "model": self.body.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.body.previous_response_id or None,
            "temperature": self.body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": self.body.tool_choice,
            "tools": [tool.model_dump() for tool in self.body.tools],
            "top_p": self.body.top_p,
            "truncation": "disabled",
            "usage": None,
            **self.own,
        }

    def final_body(self, reply: Reply) -> Json:
        """Return the body of the finished response with the policy's ``reply``."""
        cut = reply.stop_reason is not StopReason.STOP
        return {
            **self.initial_body(),
            "status": "incomplete" if cut else "completed",
            # the protocol has no reason for a deadline or a withdrawn request
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output(reply, "incomplete" if cut else "completed"),
            "usage": _usage(reply),
        }

    def _output(self, reply: Reply, status: str) -> list[Json]:
        """Return the output items of a response: reasoning, message and function calls. ``status`` is ``completed`` or
        ``incomplete``. ``reply`` is the policy's answer."""
        message, name, items = reply.message, self.context.name, list[Json]()
        if message.reasoning:
            items.append(reasoning_item(name, message.reasoning))
        if message.content or not message.tool_calls:
            logprobs = token_logprobs(reply, self.context.spell) if _LOGPROBS in self.body.include else []
            items.append(message_item(name, message.content, status, logprobs))
        for index, call in enumerate(message.tool_calls):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{name}_{index}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                    "status": status,
                }
            )
        return items


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponsesExchange:
    """A parsed request to ``/v1/responses``, with the translation of its answer."""

    form: ResponseForm
    """The JSON of the response."""
    request: EndpointRequest
    """The request to the policy."""
    conversation: tuple[Message, ...]
    """The messages up to this request, without the instructions."""

    def answer(self, replies: Sequence[Reply]) -> Json:
        """Return the body of the response, and store the conversation with the answer, so that later requests can
        continue it. ``replies`` holds exactly one reply."""
        (reply,) = replies
        self.form.context.histories[self.form.id] = (*self.conversation, reply.message)
        return self.form.final_body(reply)

    def stream(self) -> ItemEventStream:
        """Return the object that turns the answer into server-sent events."""
        return self.form.stream(self.answer)


def _usage(reply: Reply) -> Json:
    """Return the token counts of an answer in the format of the protocol."""
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


def _parse(tree: Mapping[str, Any], context: ExchangeContext) -> _ResponsesExchange:
    """Parse the body ``tree`` of a request to ``/v1/responses``, and return its exchange. ``context`` has the facts of
    the request beside its body."""
    body = read_body(ResponsesBody, tree)
    conversation = body.conversation(context.histories)
    tools = tuple(tool.tool() for tool in body.tools) if body.tool_choice == "auto" else ()
    refuse_same_names(tools)
    request = EndpointRequest(
        messages=(*body.opening(), *conversation),
        tools=tools,
        options=ChatOptions(max_new_tokens=body.max_output_tokens),
        stream=body.stream,
        ignored=set_fields(
            **{"reasoning.effort": body.reasoning.effort, "text.verbosity": body.text.verbosity},
            temperature=body.temperature,
            top_p=body.top_p,
        ),
    )
    form = ResponseForm(body=body, context=context)
    return _ResponsesExchange(form=form, request=request, conversation=conversation)


def _broken(refusal: Refusal) -> SseEvent:
    """Return the last event of a stream that fails after it has begun."""
    error = refusal.body()["error"]
    fields = {name: error[name] for name in ("code", "message", "param")}
    return SseEvent("error", {"type": "error", "sequence_number": 0, **fields, "error": error})


RESPONSES = ChatProtocol(parse=_parse, refusal=Refusal.body, broken=_broken, ping=b": sampling\n\n")


def reasoning_item(name: str, text: str) -> Json:
    """Return the output item with the reasoning ``text``, and an id derived from ``name``."""
    parts = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": parts}


def message_item(name: str, text: str, status: str, logprobs: Sequence[Json]) -> Json:
    """Return the output item with the message ``text`` and an id derived from ``name``. ``status`` is ``in_progress``,
    ``completed`` or ``incomplete``. ``logprobs`` are its tokens with their logprobs."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]}


class ItemEventStream:
    """A translator of one response into server-sent events. The items are streamed in the order reasoning, message,
    function calls."""

    def __init__(self, *, name: str, initial_body: Json, final_body: Callable[[Sequence[Reply]], Json]) -> None:
        """Create a translator that has sent no events. ``initial_body`` is the body of the response without output, the
        function ``final_body`` returns the complete body for the replies, and the ids of the items are derived from
        ``name``."""
        self._name, self._initial_body, self._final_body = name, initial_body, final_body
        self._numbers = itertools.count()
        """Counts the events of the stream."""
        self._has_started = False
        """Whether the events that begin the stream have been sent."""
        self._index = -1
        """Index of the last opened item; −1 before the first."""
        self._open_type = ""
        """Type of the open item, whose index is ``_index``; empty if no item is open."""
        self._text = ""
        """The text of the open item that has been sent so far."""

    def add(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """Yield the events that stream one piece of the answer. Reasoning and message are separate items, each opened
        by its first piece. ``choice`` is the number of the answer, always 0."""
        yield from self._begin()
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.content)):
            if not text:
                continue
            if self._open_type != kind:
                if self._open_type:
                    yield from self._close(self._item())
                yield from self._open(kind)
            self._text += text
            part = self._item()["content"][0]
            more: Json = {"logprobs": []} if "logprobs" in part else {}
            yield self._make_item_event(f"response.{part['type']}.delta", content_index=0, delta=text, **more)

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """Yield the events that end the stream: the end of the open item, the calls of tools, and the whole response.
        ``replies`` holds exactly one reply."""
        final_body = self._final_body(replies)
        yield from self._begin()
        if self._open_type:
            yield from self._close(final_body["output"][self._index])
        for item in final_body["output"][self._index + 1 :]:
            if item["type"] == "function_call":
                yield from self._call(item)
            else:  # a message without text
                yield from self._open("message")
                yield from self._close(item)
        yield self._event(f"response.{final_body['status']}", response=final_body)

    def _begin(self) -> Iterator[SseEvent]:
        """Yield the events that begin the stream, unless they have been sent."""
        if not self._has_started:
            self._has_started = True
            yield self._event("response.created", response=self._initial_body)
            yield self._event("response.in_progress", response=self._initial_body)

    def _item(self) -> Json:
        """Return the open item with the text that has been sent so far."""
        if self._open_type == "reasoning":
            return reasoning_item(self._name, self._text)
        return message_item(self._name, self._text, "completed", [])

    def _open(self, kind: str) -> Iterator[SseEvent]:
        """Yield the events that open an item of this ``kind``: ``reasoning`` or ``message``."""
        self._index, self._open_type, self._text = self._index + 1, kind, ""
        item = self._item()
        empty_item = {**item, "content": []} | ({"status": "in_progress"} if "status" in item else {})
        yield self._event("response.output_item.added", output_index=self._index, item=empty_item)
        yield self._make_item_event("response.content_part.added", content_index=0, part=item["content"][0])

    def _close(self, item: Json) -> Iterator[SseEvent]:
        """Yield the events that close the open item, whose final form is ``item``."""
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self._make_item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
        yield self._make_item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open_type = ""

    def _call(self, item: Json) -> Iterator[SseEvent]:
        """Yield the events of the function call ``item``, whose arguments are sent at once."""
        self._index += 1
        empty_item = {**item, "arguments": "", "status": "in_progress"}
        kind, about = "response.function_call_arguments", {"item_id": item["id"], "output_index": self._index}
        yield self._event("response.output_item.added", output_index=self._index, item=empty_item)
        yield self._event(f"{kind}.delta", **about, delta=item["arguments"])
        yield self._event(f"{kind}.done", **about, name=item["name"], arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _make_item_event(self, kind: str, **fields: Any) -> SseEvent:
        """Return an event of the type ``kind`` about the open item."""
        return self._event(kind, item_id=self._item()["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> SseEvent:
        """Return an event of the type ``kind``, with the next number of the stream."""
        return SseEvent(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})
