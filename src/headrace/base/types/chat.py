"""Conversations: messages that an environment or an agent sends to the model, and the model's replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.types.episode import StopReason


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that the model requests in a message."""

    id: str
    """The identifier within its conversation, which the tool's answer repeats."""
    name: str
    arguments: str
    """A JSON object as the model wrote it, which may be malformed."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation. Two conversations share a prefix as far as their messages are equal."""

    role: str
    """The role of its author: ``system``, ``user``, ``assistant`` or ``tool``."""
    content: str = ""
    reasoning: str = ""
    """The reasoning that precedes the model's answer, if its chat template separates the two; empty otherwise."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of an assistant's message."""
    tool_call_id: str = ""
    """The ``id`` of the call that this message answers, if it is the answer of a tool."""
    name: str = ""
    """The name of the tool, if the message is its answer; otherwise the name of the speaker."""
    failed: bool = False
    """Whether it is a tool's answer that reports an error."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}
    """The JSON schema of its arguments."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options for one reply of the model. An option that is unset has the value of the run's sampling settings."""

    max_new_tokens: int | None = None
    """The largest number of tokens to sample for the reply; the run's setting is an upper bound."""
    temperature: float | None = None
    """The sampling temperature. Tokens sampled at another temperature than the run's carry no loss."""
    top_p: float | None = None
    """The nucleus probability. Tokens sampled with another value than the run's carry no loss."""
    top_k: int | None = None
    """The number of likeliest tokens to draw from. Tokens sampled with another value than the run's carry no loss."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply as soon as it contains one of them."""
    agent: str = "policy"
    """The agent that replies: the author of the turn in the episode."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of the model to a conversation, as the environment or agent that asked for it receives it."""

    message: Message
    """The assistant's message, to be appended to the conversation unchanged."""
    turn: int
    """The index of the sampled turn in the episode."""
    stop_reason: StopReason
    """Why the reply ended."""
    stop: str = ""
    """The stop string that ended the reply and is not part of its content; empty if none did."""
    num_prompt_tokens: int
    """The number of tokens that the model read before its reply."""
    num_tokens: int
    """The number of tokens of the reply."""
    logprobs: tuple[float, ...] = ()
    """The log-probability of each sampled token; empty if they were not passed on."""
    token_ids: tuple[int, ...] = ()
    """The vocabulary id of each sampled token."""
