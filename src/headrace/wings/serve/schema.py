"""The bodies of requests, strictly typed: every field is used, or refused by name.

Fields of OpenAI's protocol that change nothing here are ignored; fields that would change something we cannot do are
refused unless they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from headrace.wings.serve.strict import Strict, StrictBody, read_stop

MAX_BIASES = 1024
"""Entries of one logit_bias."""
INT32_MAX = 2**31 - 1

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""What OpenAI's clients may send and what would change no answer of ours."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
}
"""What OpenAI's protocol has and this server does not, with the values that ask for nothing."""


def _read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """A text, several, token ids, or several lists of them."""
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
    return all(type(value) is int and 0 <= value <= INT32_MAX for value in values)


def _read_bias(value: object) -> dict[int, float]:
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


class StreamOptions(Strict):
    """What a stream tells besides its text."""

    include_usage: bool = False
    """One more event at the end, with the numbers of tokens."""
    include_obfuscation: bool = False
    """Taken for compatibility; nothing is padded."""


class Body(StrictBody):
    """What both kinds of requests may say."""

    ignored: ClassVar = IGNORED
    unsupported: ClassVar = UNSUPPORTED

    model: str | None = None
    """The served model's name."""
    n: int = Field(default=1, ge=1)
    """Choices per prompt."""
    stream: bool = False
    """Whether the text comes while it is sampled, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    temperature: float = Field(default=1.0, ge=0, le=100)
    """0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=INT32_MAX)
    """0 for all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10)
    logit_bias: Annotated[dict[int, float], PlainValidator(_read_bias)] = Field(default={})
    """Token id to what is added to its logit."""
    stop: Annotated[tuple[str, ...], PlainValidator(read_stop)] = ()
    """Texts that end a choice; they are no part of its text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(default=[], max_length=64)
    """Tokens that end a choice, besides the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end of sequence."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Fixes every draw; choice *i* of the request draws with seed + i. Unset: a new one each time."""
    priority: int = Field(default=0, ge=-INT32_MAX, le=INT32_MAX)
    """Higher ones are served first."""
    deadline_s: float | None = Field(default=None, gt=0, le=1e6)
    """Seconds after which each choice ends with what it has."""
    kept_sizes: bool = False
    """Whether each token comes with how many tokens it was drawn from."""

    @pydantic.field_validator("temperature")
    @classmethod
    def _dividable(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise PydanticCustomError("temperature", "expected 0, for the most likely token, or at least 0.01")
        return value


class CompletionBody(Body):
    """``POST /v1/completions``."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_read_prompts)]
    """One or several prompts, as text or as token ids."""
    max_tokens: int = Field(default=16, ge=1, le=INT32_MAX)
    """Longest choice, in tokens."""
    logprobs: int | None = Field(default=None, ge=0)
    """0 for the logprob of each sampled token; the most likely others are not known."""


def read_content(value: object) -> str:
    """A text, or the texts of several parts as one."""
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
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: Annotated[str, PlainValidator(read_content)]
    name: str | None = None
    """Handed to the chat template."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        """A field that is ``null`` is as if not there; an assistant may have said nothing."""
        if not isinstance(value, dict):
            return value
        said = {name: part for name, part in value.items() if part is not None}
        return {"content": "", **said} if said.get("role") == "assistant" else said

    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        return {"role": self.role, "content": self.content, **({"name": self.name} if self.name else {})}


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessageBody] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """The older name of ``max_completion_tokens``."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Longest choice, in tokens; unset: what the context leaves."""
    logprobs: bool = False
    """Whether each token comes with its logprob."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Must be 0: the most likely others are not known."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default={}, max_length=32)
    """Further variables of the chat template, such as ``enable_thinking``."""


AnyBody = CompletionBody | ChatBody
