"""The records between the protocols and the episodes, and the contract of a protocol (:class:`ChatProtocol`). A program
acts in an episode by HTTP requests. All requests with the same key belong to one session. A piece is a part of an
answer that is streamed while the answer is sampled."""

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
    """Largest number of answers that one request may request."""
    idle_timeout_s: int = 60
    """Seconds without activity after which a connection is closed: its client sends no request, or reads no bytes of
    the response."""
    patience: int = 16
    """Number of refusals of one session that are sent at once; later ones are delayed by ``delay_s``."""
    delay_s: float = 1.0
    """Delay in seconds of further refusals, and of refusals for wrong keys, so that a program that retries in a loop
    causes little load."""
    ping_s: float = 10.0
    """Seconds without an event after which a stream sends a ping, so that the client does not close the connection."""


@dataclass(slots=True, kw_only=True)
class Access:
    """The address and the key with which a program reaches its episode; the program receives them as environment
    variables."""

    base_url: str
    """The endpoint's URL without ``/v1``; each protocol's client appends its own path."""
    api_key: str
    """The bearer token of the OpenAI client, and ``x-api-key`` of the Anthropic client."""
    last_refusal: str = ""
    """The problem of the latest refused request; empty if no request was refused."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables from which the client libraries, and frameworks built on them, read the address and
        the key."""
        return {
            "OPENAI_BASE_URL": f"{self.base_url}/v1",
            "OPENAI_API_BASE": f"{self.base_url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRequest:
    """A request to the policy, read from the body of an HTTP request in any of the protocols."""

    messages: tuple[Message, ...]
    """The conversation to answer."""
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
    """A unique name of the request; the ids in the answer are derived from it."""
    created_s: int
    """Time of the request, in seconds since 1970."""
    spell: Callable[[int], str]
    """A function that returns the text of a token id."""
    max_choices: int = 16
    """Largest number of answers that the request may ask for."""
    histories: MutableMapping[str, tuple[Message, ...]] = field(default_factory=dict)
    """The conversation up to each earlier response of the session, by the response's id; a later request may continue
    from a response."""


class SseEvent(NamedTuple):
    """A server-sent event; ``name`` is empty if the protocol has no name for the event."""

    name: str
    data: Json | str
    """The JSON of the event, or its plain text."""


class Exchange(Protocol):
    """One parsed request, with the translation of its answer into the protocol."""

    @property
    def request(self) -> EndpointRequest:
        """Return the request to the policy."""
        ...

    def answer(self, replies: Sequence[Reply]) -> Json:
        """Return the JSON body of the response with all ``replies`` of the policy."""
        ...

    def stream(self) -> EventStream:
        """Return the object that translates a streamed answer into server-sent events."""
        ...


class EventStream(Protocol):
    """A translator of an answer into server-sent events while the answer is sampled. The first piece yields the first
    event."""

    def add(self, choice: int, piece: AnswerPiece) -> Iterator[SseEvent]:
        """Yield the events for the next piece of the answer with the number ``choice``. All text and reasoning is
        streamed by this method."""
        ...

    def end(self, replies: Sequence[Reply]) -> Iterator[SseEvent]:
        """Yield the last events, when all ``replies`` are complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatProtocol:
    """The functions that translate requests and answers of one protocol."""

    parse: Callable[[Mapping[str, Any], ExchangeContext], Exchange]
    """A function that parses a request's body. It raises :class:`Refusal`, which names the unsupported or invalid
    field."""
    refusal: Callable[[Refusal], Json]
    """A function that returns the JSON body of an error response."""
    broken: Callable[[Refusal], SseEvent]
    """A function that returns the last event of a stream that fails after it has begun."""
    ping: bytes
    """The bytes that keep a stream alive while there is no event."""
