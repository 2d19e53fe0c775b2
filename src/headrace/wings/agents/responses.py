"""OpenAI's responses: ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from headrace.base.net.refusal import Refusal, shown
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool, ToolCall
from headrace.base.types.episode import StopReason
from headrace.wings.agents.base import ChatProtocol, EndpointRequest, Json, Setting, SseEvent
from headrace.wings.agents.items import ItemTelling, message_item, thought_item
from headrace.wings.agents.reading import (  # fmt: skip
    INT32_MAX,
    NAME,
    BodyPart,
    named_answers,
    read_choice,
    refuse_same_names,
    text_of,
    token_logprobs,
    wishes,
)
from headrace.wings.serve.strict import StrictBody, read_body

_Text = Annotated[str, PlainValidator(text_of("input_text", "output_text"))]
_Status = Literal["in_progress", "completed", "incomplete"]
_LOGPROBS = "message.output_text.logprobs"


class _Said(BodyPart):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text
    id: str = ""
    status: _Status = "completed"
    phase: str = ""
    """Of an assistant's message; changes nothing."""


class _Thought(BodyPart):
    type: Literal["reasoning"]
    content: Annotated[str, PlainValidator(text_of("reasoning_text"))] = ""
    id: str = ""
    summary: list[Any] = Field(default=[], max_length=0)
    encrypted_content: Literal[""] = ""
    status: _Status = "completed"


class _ResponsesCall(BodyPart):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1)
    arguments: str = ""
    parsed_arguments: Any = None
    """OpenAI's client puts it there."""
    id: str = ""
    status: _Status = "completed"


class _CallOutput(BodyPart):
    type: Literal["function_call_output"]
    call_id: str
    output: _Text
    id: str = ""
    name: str = ""
    """Known from the call."""
    status: _Status = "completed"


def _kind(item: object) -> str:
    """A message may leave its type out."""
    return str(item.get("type") or "message") if isinstance(item, dict) else "message"


_Item = Annotated[
    Annotated[_Said, Tag("message")]
    | Annotated[_Thought, Tag("reasoning")]
    | Annotated[_ResponsesCall, Tag("function_call")]
    | Annotated[_CallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _ResponsesTool(BodyPart):
    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = True
    """Taken for compatibility: the policy writes what it writes."""


class _Reasoning(BodyPart):
    effort: str = ""
    summary: str = ""
    """Never summarized: shown as it was sampled."""


class _Format(BodyPart):
    type: Literal["text"]


class _TextConfig(BodyPart):
    format: _Format = _Format(type="text")
    verbosity: str = ""


class _ResponsesBody(StrictBody):
    ignored: ClassVar = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "stream_options", "max_tool_calls"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
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
    """Reasoning travels in the clear, whether or not it is asked for."""

    def said(self, histories: Mapping[str, tuple[Message, ...]]) -> tuple[Message, ...]:
        """The conversation, without the instructions: what comes later may go on from it."""
        before: tuple[Message, ...] = ()
        if self.previous_response_id:
            if self.previous_response_id not in histories:
                raise Refusal(
                    f"previous_response_id={shown(self.previous_response_id)} is no response of this episode",
                    remedy="name one that this key has been given, or send the whole conversation as input",
                    param="previous_response_id",
                    status=404,
                    code="previous_response_not_found",
                )
            before = histories[self.previous_response_id]
        if not self.input and not before:
            raise Refusal("input is missing", remedy="give input", param="input", code="missing_required_parameter")
        return named_answers((*before, *_messages(self.input)))


def _messages(items: Sequence[_Said | _Thought | _ResponsesCall | _CallOutput]) -> Iterator[Message]:
    """Items as messages: reasoning, text and calls that stand in this order are one message of the policy."""
    rank: list[int] = []  # of the items of the message that is put together
    parts: list[_Said | _Thought | _ResponsesCall] = []
    for item in items:
        own = _rank(item)
        if rank and (own is None or own < rank[-1] or own == rank[-1] < 2):
            yield _joined(parts)
            rank, parts = [], []
        match item:
            case _Said() | _Thought() | _ResponsesCall() if own is not None:
                rank.append(own)
                parts.append(item)
            case _Said():
                role = "system" if item.role == "developer" else item.role
                yield Message(role=role, content=item.content)
            case _CallOutput():
                yield Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if parts:
        yield _joined(parts)


def _rank(item: _Said | _Thought | _ResponsesCall | _CallOutput) -> int | None:
    """Its place in a message of the policy; ``None`` for what the policy did not write."""
    match item:
        case _Thought():
            return 0
        case _Said(role="assistant"):
            return 1
        case _ResponsesCall():
            return 2
    return None


def _joined(parts: Sequence[_Said | _Thought | _ResponsesCall]) -> Message:
    calls = (part for part in parts if isinstance(part, _ResponsesCall))
    return Message(
        role="assistant",
        content="".join(part.content for part in parts if isinstance(part, _Said)),
        reasoning="".join(part.content for part in parts if isinstance(part, _Thought)),
        tool_calls=tuple(ToolCall(id=call.call_id, name=call.name, arguments=call.arguments) for call in calls),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponsesExchange:
    body: _ResponsesBody
    asked: EndpointRequest
    said: tuple[Message, ...]
    setting: Setting

    @property
    def id(self) -> str:
        return f"resp_{self.setting.name}"

    def whole(self, replies: Sequence[Reply]) -> Json:
        (reply,) = replies
        self.setting.histories[self.id] = (*self.said, reply.message)
        return self._ended(reply)

    def stream(self) -> ItemTelling:
        return ItemTelling(name=self.setting.name, begun=self.begun(), whole=self.whole)

    def begun(self) -> Json:
        """The body of an answer of which nothing has been said."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.setting.created_s,
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
        }

    def _ended(self, reply: Reply) -> Json:
        cut = reply.stop_reason is not StopReason.STOP
        return {
            **self.begun(),
            "status": "incomplete" if cut else "completed",
            # the protocol has no word for what was withdrawn or out of time
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output(reply, "incomplete" if cut else "completed"),
            "usage": _usage(reply),
        }

    def _output(self, reply: Reply, status: str) -> list[Json]:
        message, name, items = reply.message, self.setting.name, list[Json]()
        if message.reasoning:
            items.append(thought_item(name, message.reasoning))
        if message.content or not message.tool_calls:
            logprobs = token_logprobs(reply, self.setting.spell) if _LOGPROBS in self.body.include else []
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


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


def _understand(tree: Mapping[str, Any], setting: Setting) -> _ResponsesExchange:
    body = read_body(_ResponsesBody, tree)
    said = body.said(setting.histories)
    given = body.tools if body.tool_choice == "auto" else []
    tools = tuple(Tool(name=tool.name, description=tool.description, parameters=tool.parameters) for tool in given)
    refuse_same_names(tools)
    opening = (Message(role="system", content=body.instructions),) if body.instructions else ()
    asked = EndpointRequest(
        messages=(*opening, *said),
        tools=tools,
        options=ChatOptions(max_new_tokens=body.max_output_tokens),
        stream=body.stream,
        wishes=wishes(
            **{"reasoning.effort": body.reasoning.effort, "text.verbosity": body.text.verbosity},
            temperature=body.temperature,
            top_p=body.top_p,
        ),
    )
    return _ResponsesExchange(body=body, asked=asked, said=said, setting=setting)


def _broken(refusal: Refusal) -> SseEvent:
    error = refusal.body()["error"]
    told = {name: error[name] for name in ("code", "message", "param")}
    return SseEvent("error", {"type": "error", "sequence_number": 0, **told, "error": error})


RESPONSES = ChatProtocol(understand=_understand, refusal=Refusal.body, broken=_broken, ping=b": sampling\n\n")
