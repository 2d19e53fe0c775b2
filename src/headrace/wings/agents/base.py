"""What stands between the protocols and the episodes: requests that were read, answers that are to be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headrace.base.net.refusal import Refusal
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.rollout.environments.base import AnswerPiece

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may take of the endpoint."""

    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    """Longest wait for a request's body."""
    max_open: int = 64
    """Requests of one session at once; beyond, they are told to come back later."""
    max_choices: int = 16
    """Answers that one request may ask for."""
    idle_timeout_s: int = 60
    """A connection that brings no request for so long, or takes nothing of its answer, is cut."""
    patience: int = 16
    """Refusals of one session that are told at once."""
    delay_s: float = 1.0
    """How long the others are held back, and those of wrong keys: a program that asks in a circle shall cost little."""
    ping_s: float = 10.0
    """A stream that has had nothing to say for so long says that it is alive."""


@dataclass(slots=True, kw_only=True)
class Access:
    """What a program needs to reach its episode."""

    base_url: str
    """Without ``/v1``: clients of every protocol take it as it is."""
    api_key: str
    """Bearer token of the OpenAI client, ``x-api-key`` of the Anthropic client."""
    last_refusal: str = ""
    """What the latest request was told that got no answer; empty where each got one."""

    @property
    def variables(self) -> dict[str, str]:
        """As clients, and the frameworks built on them, find it in their environment."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """What a request asks the policy for."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    options: ChatOptions
    num_choices: int = 1
    stream: bool = False
    """Whether the answer is told as server-sent events."""
    wishes: Mapping[str, float | str] = field(default_factory=dict)
    """What the request says, by field, of how the policy is to draw tokens, or to think. It does so as everywhere in
    the run: that is the distribution it is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a translation knows of its session."""

    name: str
    """No other request's: ids are made of it."""
    created_s: int
    """Seconds since 1970."""
    spell: Callable[[int], str]
    """One token as text."""
    max_choices: int = 16
    """Answers that the request may ask for."""
    histories: MutableMapping[str, tuple[Message, ...]] = field(default_factory=dict)
    """What the session's responses stand for, by their ids: later ones may go on from them."""


class SseEvent(NamedTuple):
    """One server-sent event; ``name`` is empty where the protocol gives it none."""

    name: str
    data: Json | str


class Exchange(Protocol):
    """A request that has been understood, and its answer in the words of its protocol."""

    @property
    def asked(self) -> EndpointRequest:
        """What it asks for."""
        ...

    def whole(self, replies: Sequence[Reply]) -> Json:
        """The body of the answer."""
        ...

    def stream(self) -> Telling:
        """The answer as a stream, which has not begun."""
        ...


class Telling(Protocol):
    """An answer that is told while it is sampled; it begins with its first piece."""

    def grow(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """More of one of the answers that were asked for; all of their text comes in this way."""
        ...

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """What is left to say when all of them are whole."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProtocol:
    """One protocol."""

    understand: Callable[[Mapping[str, Any], Setting], Exchange]
    """Reads a body; raises :class:`Refusal`, naming what cannot be done."""
    refusal: Callable[[Refusal], Json]
    """An error as a body."""
    broken: Callable[[Refusal], SseEvent]
    """The last event of a stream that fails halfway."""
    ping: bytes
    """What keeps a stream alive, as it is sent."""
