"""The models of request bodies, strictly typed: every field is used, or refused by name. A structure is a constraint
that an answer must match, such as a JSON schema or a regular expression; it is stored as text in the engine's format.

Fields of OpenAI's protocol that have no effect on the answer are ignored. Fields whose effect is not supported are
refused, unless their value has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import pydantic
from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from headrace.base.types.chat import Message, Tool
from headrace.engine.structure import choice, json_schema, regex
from headrace.wings.agents.reading import ChatTool, ChatToolCall
from headrace.wings.serve.strict import StreamOptions, Strict, StrictBody, read_stop

MAX_BIASES = 1024
"""Largest number of entries of one ``logit_bias``."""
INT32_MAX = 2**31 - 1
TemplateVariables = dict[str, bool | int | float | str]
"""Variables of a chat template, by name."""
MAX_TOP = 20
"""Largest number of likeliest entries that a request may request at each token."""

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Fields that OpenAI's clients may send and that do not change the answer."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
}
"""Fields of OpenAI's protocol that this server does not support, each with the values that have no effect and are
accepted."""


def _read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Return the field ``prompt`` of a request as a tuple of prompts, each a text or a tuple of token ids. The field
    may be a text, a list of texts, a list of token ids, or a list of lists of token ids. Raises pydantic's error for
    another value."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return tuple(value)
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(part, list) and part and _are_ids(part) for part in value):
            return tuple(tuple(part) for part in value)
    raise PydanticCustomError(
        "prompt", "expected a text, a list of texts, a list of token ids, or a list of lists of token ids, none empty"
    )


def _are_ids(values: list[Any]) -> bool:
    """Return whether all values are token ids: integers from 0 to 2^31 - 1."""
    return all(type(value) is int and 0 <= value <= INT32_MAX for value in values)


def _read_format(value: object) -> str:
    """Return the structure in ``response_format``, in the engine's format; an empty string for plain text. Raises
    pydantic's error for another value."""
    match value:
        case {"type": "text", **rest} if not rest:
            return ""
        case {"type": "json_object", **rest} if not rest:
            return json_schema({"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}, **rest} if not rest:
            return json_schema(schema)
    raise PydanticCustomError(
        "response_format",
        'expected the type "text", "json_object", or "json_schema" with {"json_schema": {"schema": ...}}',
    )


def _read_schema(value: object) -> str:
    """Return the structure of a JSON schema, in the engine's format; the schema is an object or JSON text. Raises
    pydantic's error for another value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("schema", "expected a JSON schema: an object, or the text of one")
    return json_schema(value)


def _read_regex(value: object) -> str:
    """Return the structure, in the engine's format, of an answer that must match a regular expression. Raises
    pydantic's error for another value."""
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("regex", "expected a regular expression as text")
    return regex(value)


def _read_choice(value: object) -> str:
    """Return the structure, in the engine's format, of an answer that must be one of the texts in a list. Raises
    pydantic's error for another value."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise PydanticCustomError("choice", "expected a list of texts, none empty")
    return choice(value)


def _read_structured(value: object) -> str:
    """Return the structure in ``structured_outputs``, an option of vLLM, in the engine's format. Raises pydantic's
    error for another value."""
    if isinstance(value, dict):
        given = {name: part for name, part in value.items() if part is not None}
        match given:
            case {"json": schema, **rest} if not rest:
                return _read_schema(schema)
            case {"regex": pattern, **rest} if not rest:
                return _read_regex(pattern)
            case {"choice": texts, **rest} if not rest:
                return _read_choice(texts)
            case {"json_object": True, **rest} if not rest:
                return json_schema({"type": "object"})
    raise PydanticCustomError("structured_outputs", "expected an object with one of json, regex, choice, json_object")


def _read_bias(value: object) -> dict[int, float]:
    """Return ``logit_bias`` as numbers to add to logits, by token id. Raises pydantic's error for another value."""
    words = f"expected an object of up to {MAX_BIASES} entries, each a token id as text and a number from -100 to 100"
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", words)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= 10
        if not is_id or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", words)
        biases[int(key)] = float(bias)
    return biases


class Body(StrictBody):
    """The common fields of the bodies of completions and chat completions."""

    ignored: ClassVar = IGNORED
    unsupported: ClassVar = UNSUPPORTED

    model: str | None = None
    """Name of the model; unset: the served model."""
    n: int = Field(default=1, ge=1)
    """Number of choices per prompt."""
    stream: bool = False
    """Whether the text is sent as server-sent events while it is sampled."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream; only with ``stream``."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Temperature of the softmax; 0 always selects the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest total probability of the most likely tokens to draw from; 1 for all tokens."""
    top_k: int = Field(default=0, ge=0, le=INT32_MAX)
    """Number of most likely tokens to draw from; 0 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Smallest probability of a token to draw, as a fraction of the most likely token's; 0 for all tokens."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """A number that is subtracted from the logits of tokens that the choice already contains."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """A number that is subtracted from the logit of a token for each occurrence of the token in the choice."""
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10)
    """Factor by which tokens of the prompt and of the choice become less likely; 1 for none."""
    logit_bias: Annotated[dict[int, float], PlainValidator(_read_bias)] = Field(default={})
    """A number to add to the logit of each given token id."""
    stop: Annotated[tuple[str, ...], PlainValidator(read_stop)] = ()
    """Texts that end a choice; they are not part of its text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(default=[], max_length=64)
    """Tokens that end a choice, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether a choice continues after the model's own end-of-sequence token."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Seed of the random draws; choice *i* of the request draws with seed + *i*. Unset: a new seed for each request."""
    priority: int = Field(default=0, ge=-INT32_MAX, le=INT32_MAX)
    """Priority of the request; requests with a higher number are served first."""
    deadline_s: float | None = Field(default=None, gt=0, le=1e6)
    """Seconds after which each choice ends with the tokens sampled so far; unset: no limit."""
    kept_sizes: bool = False
    """Whether the size of the kept-set is returned for each token."""
    response_format: Annotated[str, PlainValidator(_read_format)] = ""
    """OpenAI's form of a structure: ``json_object``, or ``json_schema`` with a schema."""
    guided_json: Annotated[str, PlainValidator(_read_schema)] = ""
    """A JSON schema that each choice follows, as an object or as text."""
    guided_regex: Annotated[str, PlainValidator(_read_regex)] = ""
    """A regular expression that each choice matches from beginning to end."""
    guided_choice: Annotated[str, PlainValidator(_read_choice)] = ""
    """A list of texts; each choice must be one of them."""
    structured_outputs: Annotated[str, PlainValidator(_read_structured)] = ""
    """A structure in vLLM's newer form: an object with one of ``json``, ``regex``, ``choice`` and ``json_object``."""
    return_tokens_as_token_ids: bool = False
    """Whether the logprobs identify tokens as ``token_id:N`` instead of their text, since two tokens may have the same
    text."""

    @property
    def structure(self) -> str:
        """Return the structure that every choice must follow, in the engine's format, from the field that sets it; an
        empty string for none."""
        return next(iter(self._structures().values()), "")

    @property
    def structure_field(self) -> str:
        """Return the name of the field that sets a structure; an empty string for none."""
        return next(iter(self._structures()), "")

    def _structures(self) -> dict[str, str]:
        """Return every structure that the request sets, by the name of its field."""
        names = ("response_format", "guided_json", "guided_regex", "guided_choice", "structured_outputs")
        given = (self.response_format, self.guided_json, self.guided_regex, self.guided_choice, self.structured_outputs)
        return {name: structure for name, structure in zip(names, given, strict=True) if structure}

    @pydantic.model_validator(mode="after")
    def _one_structure(self) -> Body:
        """Refuse a request with several structures, and a structure together with ``ignore_eos``, because a structured
        answer must be able to end."""
        if len(given := self._structures()) > 1:
            raise PydanticCustomError(
                "structure", f"expected one structure, and {' and '.join(given)} ask for one each"
            )
        if self.structure and self.ignore_eos:
            raise PydanticCustomError("structure", "expected no ignore_eos: an answer of a structure has an end")
        return self

    @pydantic.field_validator("temperature")
    @classmethod
    def _dividable(cls, value: float) -> float:
        """Refuse a temperature above 0 and below 0.01, since logits are divided by the temperature; 0 itself is
        allowed, and selects the most likely token."""
        if 0 < value < 0.01:
            raise PydanticCustomError("temperature", "expected 0, for the most likely token, or at least 0.01")
        return value


class CompletionBody(Body):
    """The body of ``POST /v1/completions``: prompts to continue, without a chat template."""

    ignored: ClassVar = IGNORED | {"parallel_tool_calls"}
    unsupported: ClassVar = {
        **UNSUPPORTED, "suffix": ("",), "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto")
    }  # fmt: skip

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_read_prompts)]
    """One or several prompts, as text or as token ids."""
    max_tokens: int = Field(default=16, ge=0, le=INT32_MAX)
    """Largest number of tokens of a choice; 0, which samples nothing, only with ``echo``."""
    echo: bool = False
    """Whether a choice begins with its prompt, which has logprobs if ``logprobs`` is set."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    """The number of likeliest entries at each token; 0 to get the logprob of each token alone."""


def read_content(value: object) -> str:
    """Return the text of a message: ``value`` is a text, or a list of text parts that are joined. Raises pydantic's
    error for another value, such as an image."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict) and part.keys() == {"type", "text"}]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) == len(value) and all(part["type"] == "text" for part in value):
            return "".join(strings)
    raise PydanticCustomError(
        "content", 'expected a text, or a list of {"type": "text", "text": ...}: this server reads text alone'
    )


class ChatMessageBody(Strict):
    """One message of a conversation in a request."""

    role: str = Field(min_length=1, max_length=64)
    """Role of the author, such as ``user`` or ``assistant``."""
    content: Annotated[str, PlainValidator(read_content)]
    """Text of the message; text parts are joined."""
    name: str | None = None
    """Name of the author, which the chat template may use."""
    tool_calls: list[ChatToolCall] = Field(default=[], max_length=1024)
    """The calls of an assistant's message."""
    tool_call_id: str = ""
    """The call that this message answers, if its role is ``tool``."""
    refusal: Literal[""] = ""
    """Sent by OpenAI's clients with earlier answers; must be empty."""
    annotations: list[Any] = Field(default=[], max_length=0)
    """Sent by OpenAI's clients with earlier answers; must be empty."""
    parsed: Any = None
    """Added by OpenAI's client; not read."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        """Drop fields that are ``null``; an assistant's message without content has empty content."""
        if not isinstance(value, dict):
            return value
        fields = {name: part for name, part in value.items() if part is not None}
        return {"content": "", **fields} if fields.get("role") == "assistant" else fields

    def message(self) -> Message:
        """Return the message as the record that chat templates are rendered from."""
        return Message(
            role=self.role,
            content=self.content,
            name=self.name or "",
            tool_calls=tuple(call.call() for call in self.tool_calls),
            tool_call_id=self.tool_call_id,
        )


class ToolChoice(NamedTuple):
    """The field ``tool_choice`` of a request: whether the model may, must or must not call a tool, and which tool."""

    kind: str
    """``none``, ``auto`` or ``required``."""
    name: str = ""
    """The tool that must be called; empty for any tool."""


def _read_tool_choice(value: object) -> ToolChoice:
    """Return whether the answer may, must or must not call a tool, and which, from ``tool_choice`` of a request. Raises
    pydantic's error for another value."""
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name), **within}, **rest} if name and not (rest or within):
            return ToolChoice("required", name)
    raise PydanticCustomError(
        "tool_choice", 'expected "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )


class ChatBody(Body):
    """The body of ``POST /v1/chat/completions``: a conversation, whose next message is sampled."""

    messages: list[ChatMessageBody] = Field(min_length=1)
    """The conversation so far."""
    tools: list[ChatTool] = Field(default=[], max_length=1024)
    """Tools that the model may call."""
    tool_choice: Annotated[ToolChoice, PlainValidator(_read_tool_choice)] = ToolChoice("auto")
    """Whether the model may or must call a tool, and which."""
    parallel_tool_calls: bool = True
    """Whether one answer may contain several calls."""
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """The deprecated name of ``max_completion_tokens``."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Largest number of tokens of a choice; unset: the space that the prompt leaves in the context."""
    logprobs: bool = False
    """Whether each token carries its logprob."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)
    """The number of likeliest entries at each token; needs ``logprobs``."""
    chat_template_kwargs: TemplateVariables = Field(default={}, max_length=32)
    """Further variables of the chat template, such as ``enable_thinking``."""

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Return the tools that the prompt describes to the model; none if ``tool_choice`` is ``none``."""
        return () if self.tool_choice.kind == "none" else tuple(tool.tool() for tool in self.tools)

    @pydantic.model_validator(mode="after")
    def _calls_can_be_made(self) -> ChatBody:
        """Refuse options of tools that contradict each other, such as a required call of a tool that is not offered."""
        names = [tool.function.name for tool in self.tools]
        choice = self.tool_choice
        if choice.kind == "required" and not (choice.name in names if choice.name else names):
            raise PydanticCustomError("tool_choice", "expected tools among which is the one to call")
        if self.offered and self.structure:
            raise PydanticCustomError("tools", "expected no structure of the answer beside tools: calls have their own")
        if self.tools and choice.kind == "required" and self.ignore_eos:
            raise PydanticCustomError("tool_choice", "expected no ignore_eos: an answer that is a call has an end")
        if self.offered and choice.kind == "auto" and not self.parallel_tool_calls:
            raise PydanticCustomError(
                "parallel_tool_calls", "expected true: only with tool_choice 'required' can calls be counted"
            )
        return self


AnyBody = CompletionBody | ChatBody
