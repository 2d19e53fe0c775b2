"""The translation of OpenAI's chat completions protocol, ``POST /v1/chat/completions``. The classes ``_Chat...`` and
``_Tool...`` are models of parts of a request's body. A choice is one of the answers that a request asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from headrace.base.net.refusal import Refusal
from headrace.base.types.chat import ChatOptions, Message, Reply
from headrace.base.types.episode import StopReason
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import ChatProtocol, EndpointRequest, ExchangeContext, Json, SseEvent
from headrace.wings.agents.reading import (  # fmt: skip
    INT32_MAX,
    BodyPart,
    ChatTool,
    ChatToolCall,
    encode_call,
    make_text_validator,
    named_answers,
    read_choice,
    refuse_same_names,
    set_fields,
    token_logprobs,
)
from headrace.wings.serve.strict import StreamOptions, StrictBody, read_body, read_stop

_Text = Annotated[str, PlainValidator(make_text_validator("text"))]


class _ChatInput(BodyPart):
    """A message of a request that the policy did not write: from the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: _Text
    name: str = ""

    def message(self) -> Message:
        """Return the message in Headrace's form."""
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content=self.content, name=self.name)


class _ChatAnswer(BodyPart):
    """A message of a request that the policy wrote earlier."""

    role: Literal["assistant"]
    content: _Text = ""
    reasoning_content: str = ""
    reasoning: str = ""
    """The newer name of ``reasoning_content``."""
    tool_calls: list[ChatToolCall] = Field(default=[])
    refusal: Literal[""] = ""
    annotations: list[Any] = Field(default=[], max_length=0)
    parsed: Any = None
    """Added by OpenAI's client; not read."""
    name: str = ""

    def message(self) -> Message:
        """Return the assistant's message in Headrace's form."""
        return Message(
            role="assistant",
            content=self.content,
            reasoning=self.reasoning_content or self.reasoning,
            tool_calls=tuple(call.call() for call in self.tool_calls),
            name=self.name,
        )


class _ToolAnswer(BodyPart):
    """A message of a request with the result of a tool call."""

    role: Literal["tool"]
    content: _Text
    tool_call_id: str
    name: str = ""
    """Not used: the tool's name is taken from the call."""

    def message(self) -> Message:
        """Return the message in Headrace's form."""
        return Message(role="tool", content=self.content, tool_call_id=self.tool_call_id)


class _ChatBody(StrictBody):
    """The body of a chat completion request. ``ignored`` and ``unsupported`` list fields that have no effect and fields
    that are refused, the latter with the values that are accepted."""

    ignored: ClassVar = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "seed"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        }
    )
    unsupported: ClassVar = {
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "moderation": (),
        "web_search_options": (),
        "frequency_penalty": (0, 0.0),
        "presence_penalty": (0, 0.0),
        "logit_bias": ({},),
        "top_logprobs": (0,),
    }
    model: str = ""
    messages: list[Annotated[_ChatInput | _ChatAnswer | _ToolAnswer, Field(discriminator="role")]] = Field(min_length=1)
    tools: list[ChatTool] = Field(default=[], max_length=1024)
    tool_choice: Annotated[str, PlainValidator(read_choice)] = "auto"
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=INT32_MAX)
    stop: Annotated[tuple[str, ...], PlainValidator(read_stop)] = ()
    reasoning_effort: str = ""
    verbosity: str = ""
    logprobs: bool = False
    return_token_ids: bool = False

    def request(self, context: ExchangeContext) -> EndpointRequest:
        """Return the request to the policy in Headrace's form. Raises :class:`Refusal` if the body asks for too many
        choices, or offers two tools with the same name. ``context`` has the facts of the request beside its body."""
        if self.n > context.max_choices:
            raise Refusal(
                f"n={self.n} is more than {context.max_choices}",
                remedy=f"ask for n <= {context.max_choices}",
                param="n",
            )
        tools = tuple(tool.tool() for tool in self.tools) if self.tool_choice == "auto" else ()
        refuse_same_names(tools)
        return EndpointRequest(
            messages=named_answers(message.message() for message in self.messages),
            tools=tools,
            options=ChatOptions(max_new_tokens=self.max_completion_tokens or self.max_tokens, stop=self.stop),
            num_choices=self.n,
            stream=self.stream,
            ignored=set_fields(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                reasoning_effort=self.reasoning_effort,
                verbosity=self.verbosity,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatExchange:
    """A parsed chat completion request, with the translation of its answers."""

    body: _ChatBody
    """The body as the client sent it."""
    request: EndpointRequest
    """The request to the policy, in Headrace's form."""
    context: ExchangeContext
    """The facts of the request beside its body."""

    def answer(self, replies: Sequence[Reply]) -> Json:
        """Return the body of the response, with one choice for each of the ``replies``."""
        choices = []
        for index, reply in enumerate(replies):
            message = {"role": "assistant", "refusal": None, **_message(reply.message)}
            choices.append({"index": index, "message": message, **self.end(reply)})
        return {**self.frame("chat.completion", choices), "usage": _usage(replies)}

    def stream(self) -> _ChatStream:
        """Return the object that translates the answers into server-sent events."""
        return _ChatStream(self)

    def frame(self, kind: str, choices: list[Json]) -> Json:
        """Return the JSON object of a response or an event of the type ``kind`` with these ``choices``."""
        name, created_s = f"chatcmpl-{self.context.name}", self.context.created_s
        return {"id": name, "object": kind, "created": created_s, "model": self.body.model, "choices": choices}

    def end(self, reply: Reply) -> Json:
        """Return the fields at the end of the choice with the answer ``reply``: logprobs, the finish reason and, if
        requested, the token ids."""
        logprobs = None
        if self.body.logprobs:
            logprobs = {"content": token_logprobs(reply, self.context.spell), "refusal": None}
        ids = {"token_ids": list(reply.token_ids)} if self.body.return_token_ids else {}
        return {"logprobs": logprobs, "finish_reason": _finish(reply), "stop_reason": reply.stop_reason, **ids}


class _ChatStream:
    """A translator of answers into server-sent chunks. Each chunk adds a delta to one of the choices."""

    def __init__(self, exchange: _ChatExchange) -> None:
        """Create a translator of the answers to ``exchange`` that has sent no events."""
        self._exchange = exchange
        self._usage: Json = {"usage": None} if exchange.body.stream_options.include_usage else {}
        """The field for the usage in every event; empty unless the request includes the usage."""
        self._started_choices: set[int] = set()
        """The choices whose first event has been sent."""

    def add(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """Yield the events that stream one piece of a choice."""
        yield from self._begin(choice)
        for name, text in (("reasoning_content", piece.reasoning), ("content", piece.content)):
            if text:
                yield self._chunk(choice, {name: text})

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """Yield the events that end the stream: the calls of tools and the finish reason of each choice, and the usage
        if it is requested. ``replies`` are the complete answers."""
        for choice, reply in enumerate(replies):
            yield from self._begin(choice)
            for index, call in enumerate(_message(reply.message).get("tool_calls", ())):
                yield self._chunk(choice, {"tool_calls": [{"index": index, **call}]})
            yield self._chunk(choice, {}, **self._exchange.end(reply))
        if self._usage:
            yield SseEvent("", {**self._exchange.frame("chat.completion.chunk", []), "usage": _usage(replies)})
        yield SseEvent("", "[DONE]")

    def _begin(self, choice: int) -> Iterator[SseEvent]:
        """Yield the event that begins a choice, unless it has been sent."""
        if choice not in self._started_choices:
            self._started_choices.add(choice)
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def _chunk(self, choice: int, delta: Json, **more: Any) -> SseEvent:
        """Return the event that adds ``delta`` to a choice; ``more`` are further fields of the choice."""
        part = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return SseEvent("", {**self._exchange.frame("chat.completion.chunk", [part]), **self._usage})


def _message(message: Message) -> Json:
    """Return the policy's message as JSON; its content is ``null`` if the message calls tools and has no text."""
    fields: Json = {"content": message.content or (None if message.tool_calls else "")}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [encode_call(call) for call in message.tool_calls]
    return fields


def _finish(reply: Reply) -> str:
    """Return the protocol's ``finish_reason`` of a choice."""
    if reply.stop_reason is not StopReason.STOP:
        return "length"  # the protocol has no value for a deadline or a withdrawn request
    return "tool_calls" if reply.message.tool_calls else "stop"


def _usage(replies: Sequence[Reply]) -> Json:
    """Return the token counts of an answer in OpenAI's format. The prompt, which all ``replies`` share, is counted
    once."""
    num_prompt, num_sampled = replies[0].num_prompt_tokens, sum(reply.num_tokens for reply in replies)
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled
    }  # fmt: skip


def _parse(tree: Mapping[str, Any], context: ExchangeContext) -> _ChatExchange:
    """Parse the body ``tree`` of a chat completion request, and return its exchange. Raises :class:`Refusal` for
    options that contradict each other. ``context`` has the facts of the request beside its body."""
    body = read_body(_ChatBody, tree)
    if "stream_options" in body.model_fields_set and not body.stream:
        raise Refusal(
            "stream_options is given, and the answer is not a stream",
            remedy="set stream=true, or leave stream_options out",
            param="stream_options",
        )
    older, newer = body.max_tokens, body.max_completion_tokens
    if None not in (older, newer) and older != newer:
        raise Refusal(
            f"max_tokens={older} and max_completion_tokens={newer} differ",
            remedy="give max_completion_tokens alone",
            param="max_tokens",
        )
    return _ChatExchange(body=body, request=body.request(context), context=context)


CHAT = ChatProtocol(
    parse=_parse, refusal=Refusal.body, broken=lambda refusal: SseEvent("", refusal.body()), ping=b": sampling\n\n"
)
