"""Conversations: what an environment or an agent says to the model, and what the model answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.types.episode import StopReason


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model asks for."""

    id: str
    """Names it within its conversation; the tool's answer repeats it."""
    name: str
    arguments: str
    """A JSON object, as the model wrote it: it may be malformed."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message. Two conversations are the same as far as their messages are equal."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str = ""
    reasoning: str = ""
    """What the model thought before it answered, where its template keeps that apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant's message."""
    tool_call_id: str = ""
    """Of a tool's answer: the call that it answers."""
    name: str = ""
    """Of a tool's answer, the tool; of others, who speaks."""
    failed: bool = False
    """Whether it is a tool's answer, and an error."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """What the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}
    """JSON schema of its arguments."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one answer is asked for; what is unset is as the run samples."""

    max_new_tokens: int | None = None
    """Never more than the run samples."""
    temperature: float | None = None
    """What is sampled at another one than the run's carries no loss."""
    top_p: float | None = None
    """As for the temperature."""
    top_k: int | None = None
    """As for the temperature."""
    stop: tuple[str, ...] = ()
    agent: str = "policy"
    """Who answers: the name under which the turn stands in the episode."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    message: Message
    """To be appended to the conversation as it is."""
    turn: int
    """Its index in the episode."""
    stop_reason: StopReason
    stop: str = ""
    """The stop string that ended it, which is no part of its content; empty where none did."""
    num_prompt_tokens: int
    num_tokens: int
    logprobs: tuple[float, ...] = ()
    """One per sampled token."""
    token_ids: tuple[int, ...] = ()
    """The sampled tokens."""
