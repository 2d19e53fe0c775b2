"""The records between the protocols and the episodes: requests as they were read, and answers as they will be written.
A program acts in an episode by requests over HTTP; those with one key are a session. A piece is a part of an answer
that is streamed while it is sampled."""

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
    """The limits of each session at the endpoint."""

    max_body_bytes: int = 8 * 2**20
    """Largest size of a request body, in bytes."""
    body_timeout_s: float = 30.0
    """Longest wait for the whole body of a request, in seconds."""
    max_open: int = 64
    """Largest number of open requests of one session; further ones are refused with status 429."""
    max_choices: int = 16
    """Largest number of answers that one request may ask for."""
    idle_timeout_s: int = 60
    """Seconds after which a connection is closed that sends no request or reads nothing of its answer."""
    patience: int = 16
    """Number of refusals of one session that are sent at once; later ones are delayed by ``delay_s``."""
    delay_s: float = 1.0
    """Delay in seconds of further refusals, and of those for wrong keys, so that a program that retries in a loop costs
    little."""
    ping_s: float = 10.0
    """Seconds without an event after which a stream sends a ping, which shows that the server is alive."""


@dataclass(slots=True, kw_only=True)
class Access:
    """The address and the key with which a program reaches its episode; it gets them as environment variables."""

    base_url: str
    """The endpoint's URL without ``/v1``; each protocol's client appends its own path."""
    api_key: str
    """The bearer token of the OpenAI client, and ``x-api-key`` of the Anthropic client."""
    last_refusal: str = ""
    """The problem of the latest request that was refused; empty if none was."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables from which the clients, and frameworks built on them, read address and
        key."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """A request to the policy, as read from a body of any of the protocols."""

    messages: tuple[Message, ...]
    """The conversation that is to be answered."""
    tools: tuple[Tool, ...]
    """The tools that the policy may call."""
    options: ChatOptions
    """The settings of the answer that a request may choose, such as its longest length."""
    num_choices: int = 1
    """Number of answers to sample."""
    stream: bool = False
    """Whether the answer is sent as server-sent events."""
    ignored: Mapping[str, float | str] = field(default_factory=dict)
    """Fields of the request, with their values, that ask for other sampling or reasoning settings. They have no effect:
    the policy samples from the distribution that it is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """The facts of one request, beside its body, that a protocol needs for its translation."""

    name: str
    """A name that no other request has; the ids in the answer are made from it."""
    created_s: int
    """Time of the request, in seconds since 1970."""
    spell: Callable[[int], str]
    """A function that returns the text of a token id."""
    max_choices: int = 16
    """Largest number of answers that the request may ask for."""
    histories: MutableMapping[str, tuple[Message, ...]] = field(default_factory=dict)
    """The conversation up to each earlier response of the session, by the response's id; a request may continue one."""


class SseEvent(NamedTuple):
    """A server-sent event; ``name`` is empty where the protocol gives the event no name."""

    name: str
    data: Json | str
    """The JSON of the event, or its text as it is."""


class Exchange(Protocol):
    """One request that has been read, with the translation of its answer into the protocol."""

    @property
    def request(self) -> EndpointRequest:
        """Return the request to the policy."""
        ...

    def answer(self, replies: Sequence[Reply]) -> Json:
        """Return the JSON body of the response that holds all ``replies`` of the policy."""
        ...

    def stream(self) -> EventStream:
        """Return the object that turns the answer into server-sent events, for an answer that is streamed."""
        ...


class EventStream(Protocol):
    """An object that turns an answer into server-sent events while it is sampled. The first event comes with the first
    piece."""

    def add(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """Yield the events for one more piece of the answer with the number ``choice``. All streamed text passes
        through this method."""
        ...

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """Yield the last events, once all ``replies`` are complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProtocol:
    """The functions that translate requests and answers of one protocol."""

    parse: Callable[[Mapping[str, Any], ExchangeContext], Exchange]
    """A function that reads a request's body; it raises :class:`Refusal`, which names what is not supported."""
    refusal: Callable[[Refusal], Json]
    """A function that returns the JSON body of an error response."""
    broken: Callable[[Refusal], SseEvent]
    """A function that returns the last event of a stream that fails after it has begun."""
    ping: bytes
    """The bytes that keep a stream alive while there is no event."""
