"""The processing of one completion request, from its body to the last byte of its answer. A request has one or several
choices; each choice is a separate answer, which the engine returns in pieces. A refusal is an error that becomes the
HTTP response."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Send

from headrace.base.clock import Clock
from headrace.base.errors import ComponentDied, RequestError
from headrace.base.net.refusal import EVENTS, Refusal
from headrace.engine.base import Engine
from headrace.engine.native.masks import MaskMaker
from headrace.rollout.environments.base import AnswerPiece
from headrace.wings.agents.base import ExchangeContext, SseEvent
from headrace.wings.agents.responses import RESPONSES, ResponseForm
from headrace.wings.serve import prompts
from headrace.wings.serve.answers import AnswerHead, Json, make_usage
from headrace.wings.serve.body import BodyLimits, read_object
from headrace.wings.serve.calls import CallFinder
from headrace.wings.serve.chat import ServedTokenizer
from headrace.wings.serve.choices import ChoicePiece, ChoiceRequest, TextOptions, sample_all
from headrace.wings.serve.metrics import ServerMetrics
from headrace.wings.serve.responses import make_response, read_response, rename_refused_field
from headrace.wings.serve.schema import AnyBody, ChatBody, CompletionBody
from headrace.wings.serve.strict import read_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The components that all requests use: the engine, the tokenizer and the limits. They are created once the model
    is loaded."""

    engine: Engine
    tokenizer: ServedTokenizer
    served: prompts.ServedModel
    """The model's name, its context and the limits of requests."""
    clock: Clock
    """The clock that measures the durations of requests."""
    masks: MaskMaker | None = None
    """The compiler of structures, such as JSON schemas, to token masks, which the engine uses too. Requests with a
    structure that cannot be compiled are refused before they reach the engine; ``None``: only the engine checks
    structures."""
    encoder: Executor
    """The thread that tokenizes prompts, so that a long prompt does not block the event loop and with it all
    streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A checked request with its tokenized prompts, and the data that its answer needs."""

    body: AnyBody
    choices: list[ChoiceRequest]
    """The requests to the engine, one for each choice."""
    num_prompt_tokens: int
    """Number of tokens of all prompts; a prompt with several choices counts once."""
    head: AnswerHead
    """The common fields of all parts of the answer."""
    text_options: TextOptions
    """The options for the text of the choices."""
    response: ResponseForm | None = None
    """The builder of the answer to ``/v1/responses``; ``None`` for completions and chats."""

    def whole(self, pieces: list[list[ChoicePiece]]) -> Json:
        """Return the JSON of the whole answer. ``pieces`` are the pieces of each choice, in order."""
        if self.response is not None:
            return make_response(self.response, self.head, pieces[0], self.num_prompt_tokens)
        answer = self.head.frame([self.head.whole_choice(parts) for parts in pieces], streaming=False)
        return {**answer, "usage": make_usage(self.num_prompt_tokens, _count_sampled(pieces))}


def make_body_limits(service: Service) -> BodyLimits:
    """Return the limits for the body of one request, from the settings of the server of ``service``."""
    limits = service.served.settings
    return BodyLimits(
        max_bytes=limits.max_body_bytes,
        timeout_s=limits.body_timeout_s,
        remedy="send fewer or shorter prompts, or raise serve.max_body_bytes",
    )


async def parse_request(request: Request, service: Service) -> ParsedRequest:
    """Read and check an HTTP request to one of the completion routes, and tokenize its prompts in a thread of the
    service, so that streams continue meanwhile. Raises :class:`Refusal` for an invalid or unsupported request."""
    path, name = request.url.path, secrets.token_hex(12)
    created_s = int(service.clock.wall())
    tree = await read_object(request, make_body_limits(service))
    context = ExchangeContext(name=name, created_s=created_s, spell=service.tokenizer.spell)
    body, response = _read_body(path, tree, context, service.served.name)
    is_chat = isinstance(body, ChatBody)
    prompts.check_body(body, service.served)
    loop, tokenizer = asyncio.get_running_loop(), service.tokenizer
    ids = await loop.run_in_executor(service.encoder, prompts.encode_prompts, body, tokenizer, service.served)
    structure = prompts.make_structure(body, ids, tokenizer)
    if structure and service.masks is not None:
        param = body.structure_field or "tools"
        # not in the encoder's thread, where the prompts of all requests would wait for a structure that takes seconds
        with rename_refused_field() if response else nullcontext():
            await asyncio.to_thread(_compile, service.masks, structure, param)
    choices = prompts.make_choices(body, ids, tokenizer, service.served, structure)
    with_logprobs = body.logprobs if isinstance(body, ChatBody) else body.logprobs is not None
    head = AnswerHead(
        id=f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        model=body.model or service.served.name,
        created_s=created_s,
        is_chat=is_chat,
        with_logprobs=with_logprobs,
        with_kept_sizes=body.kept_sizes,
        spell=_name_token if body.return_tokens_as_token_ids else tokenizer.spell,
    )
    return ParsedRequest(
        body=body,
        choices=choices,
        num_prompt_tokens=sum(map(len, ids)),
        head=head,
        text_options=_make_text_options(body, ids, tokenizer),
        response=response,
    )


def _read_body(path: str, tree: Json, context: ExchangeContext, name: str) -> tuple[AnyBody, ResponseForm | None]:
    """Return the checked body of a request to ``path``, whose JSON is ``tree``, and the builder of its answer for
    ``/v1/responses``, otherwise ``None``. ``name`` is the model's name if the request has no model."""
    if path.endswith("/responses"):
        return read_response(tree, context, name)
    return (read_body(ChatBody, tree) if path.endswith("/chat/completions") else read_body(CompletionBody, tree)), None


def _make_text_options(body: AnyBody, ids: list[list[int]], tokenizer: ServedTokenizer) -> TextOptions:
    """Return the options for the text of the choices: when text is sent, whether the position of each token is
    computed, and whether the text is searched for calls of tools. ``ids`` are the prompts as token ids."""
    if not isinstance(body, ChatBody):
        return TextOptions(decode=tokenizer.decode, streaming=body.stream, offsets=body.logprobs is not None)
    if not body.offered:
        return TextOptions(decode=tokenizer.decode, streaming=body.stream, offsets=False)
    finder = partial(CallFinder, tokenizer.parser, opened=tokenizer.opens_thought(ids[0]))
    return TextOptions(decode=tokenizer.decode_calls, streaming=body.stream, offsets=False, finder=finder)


def _compile(masks: MaskMaker, structure: str, param: str) -> None:
    """Compile the ``structure`` from the field ``param`` of a request. The compiled form is cached, so that the engine
    does not compile it again. Raises :class:`Refusal` if the structure is not supported."""
    try:
        masks(structure)
    except RequestError as error:
        raise Refusal(error.problem, remedy=error.remedy, param=param, code="unsupported_value") from None


class Meter:
    """A meter of one request, from its arrival to its end, which adds its measurements to the server's metrics."""

    def __init__(self, service: Service, metrics: ServerMetrics, path: str) -> None:
        """Create a meter of a request to ``path``, which has just arrived. ``service`` has the clock, and ``metrics``
        get the measurements."""
        self._clock, self._metrics, self._path = service.clock, metrics, path
        self._start_s = service.clock.now()
        """Time at which the request arrived."""
        self._first: dict[int, float] = {}
        """Time of the first token of each choice, by the index of the choice."""
        self._tokens: dict[int, int] = {}
        """Number of tokens of each choice so far, by the index of the choice."""
        self.num_sampled = 0
        """Number of tokens sampled so far, in all choices."""

    def piece(self, piece: ChoicePiece) -> None:
        """Record a piece of a choice: its number of tokens, the time to the first token of the request, and, with the
        last piece of a choice, why it ended and the mean time between its tokens."""
        now_s, count = self._clock.now(), piece.tokens.num_sampled
        self.num_sampled += count
        if not count and piece.stop_reason is None:
            return  # the prompt of an echo
        if not self._first:
            self._metrics.first_token_seconds.labels(self._path).observe(now_s - self._start_s)
        if piece.index not in self._first:
            self._first[piece.index] = now_s
        else:
            self._tokens[piece.index] = self._tokens.get(piece.index, 0) + count
        if piece.stop_reason is not None:
            self._metrics.choices.labels(piece.stop_reason.value).inc()
            # the first piece is left out, because its time includes the pass over the prompt
            later = self._tokens.get(piece.index, 0)
            if later:
                self._metrics.token_seconds.observe((now_s - self._first[piece.index]) / later)

    def end(self) -> None:
        """Record the duration of the request, which has ended."""
        self._metrics.seconds.labels(self._path).observe(self._clock.now() - self._start_s)


async def answer_whole(parsed: ParsedRequest, service: Service, meter: Meter) -> JSONResponse:
    """Sample all choices of ``parsed`` with the engine of ``service``, and return them in one JSON response with the
    usage. ``meter`` measures the pieces as they arrive."""
    pieces: list[list[ChoicePiece]] = [[] for _ in parsed.choices]

    async def keep(piece: ChoicePiece) -> None:
        """Store a piece of a choice. If the choice was sampled again from its start, discard its earlier pieces."""
        if piece.restarted:
            pieces[piece.index].clear()
        meter.piece(piece)
        pieces[piece.index].append(piece)

    await sample_all(service.engine, parsed.choices, parsed.text_options, keep)
    return JSONResponse(parsed.whole(pieces))


class AnswerEventStream:
    """An answer that is sent as server-sent events, one for each piece. The HTTP response begins with the first piece.
    Before that, while ``has_started`` is false, the request can still be refused with an HTTP status."""

    def __init__(self, parsed: ParsedRequest, meter: Meter, send: Send) -> None:
        """Create the stream of the answer to ``parsed``. ``meter`` measures its pieces, and ``send`` is ASGI's function
        for sending to the client."""
        self._parsed, self._meter, self._send = parsed, meter, send
        self._seen: set[int] = set()
        """Indices of the choices of which an event was sent."""
        self._usage: Json = {"usage": None} if parsed.body.stream_options.include_usage else {}
        """The field for the usage in every event; empty unless the request includes the usage."""
        self.has_started = False

    async def write(self, piece: ChoicePiece) -> None:
        """Send one piece of a choice as an event. Raises :class:`Refusal` if the choice was sampled again from its
        start after some of its text was sent."""
        self._meter.piece(piece)
        is_first = piece.index not in self._seen
        if piece.restarted and not is_first:
            raise Refusal(
                f"choice {piece.index} was restarted with new weights after some of its text was sent",
                remedy="send the request again",
                status=503,
                code="restarted",
            )
        self._seen.add(piece.index)
        await self._write(piece, first=is_first)

    async def _write(self, piece: ChoicePiece, *, first: bool) -> None:
        """Send a piece as an event in the format of completions or chats; ``first`` is true for the first piece of a
        choice."""
        choice = self._parsed.head.event_choice(piece, first=first)
        await self.event({**self._parsed.head.frame([choice], streaming=True), **self._usage})

    async def finish(self) -> None:
        """Send the event with the usage, if the request includes it, and end the stream."""
        if self._usage:
            numbers = make_usage(self._parsed.num_prompt_tokens, self._meter.num_sampled)
            await self.event({**self._parsed.head.frame([], streaming=True), "usage": numbers})
        await self._data(b"data: [DONE]\n\n", more=False)

    async def fail(self, refusal: Refusal) -> None:
        """Send ``refusal`` as the last event of a stream that has begun."""
        await self._data(_encode_event(refusal.body()), more=False)

    async def event(self, tree: Json) -> None:
        """Send the JSON object ``tree`` as one event; more events follow."""
        await self._data(_encode_event(tree), more=True)

    @staticmethod
    def create(parsed: ParsedRequest, meter: Meter, send: Send) -> AnswerEventStream:
        """Return the stream of the answer to ``parsed``, in the format of its protocol. ``send`` is ASGI's function for
        sending to the client. ``meter`` measures the pieces of the answer."""
        if parsed.response is not None:
            return _ResponseEventStream(parsed, parsed.response, meter, send)
        return AnswerEventStream(parsed, meter, send)

    async def _data(self, data: bytes, *, more: bool) -> None:
        """Send bytes to the client; send the head of the HTTP response before the first bytes. ``more`` is true if
        further bytes follow."""
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class _ResponseEventStream(AnswerEventStream):
    """An answer to ``/v1/responses`` as server-sent events, each with a name. ``form`` builds its JSON and its
    events."""

    def __init__(self, parsed: ParsedRequest, form: ResponseForm, meter: Meter, send: Send) -> None:
        """Create the stream of the answer to ``parsed``, whose JSON and events ``form`` builds. ``meter`` measures its
        pieces, and ``send`` is ASGI's function for sending to the client."""
        super().__init__(parsed, meter, send)
        self._pieces: list[ChoicePiece] = []
        """The pieces of the only choice so far."""
        self._events = form.stream(lambda _: parsed.whole([self._pieces]))
        """The translator of pieces into events."""

    async def _write(self, piece: ChoicePiece, *, first: bool) -> None:
        """Send the events that a piece adds to the response."""
        self._pieces.append(piece)
        text = AnswerPiece(num_prompt_tokens=self._parsed.num_prompt_tokens, content=piece.text)
        await self._send_all(self._events.add(piece.index, text))

    async def finish(self) -> None:
        """Send the last events, with the whole response, and end the stream."""
        await self._send_all(self._events.end(()))
        await self._data(b"", more=False)

    async def fail(self, refusal: Refusal) -> None:
        """Send ``refusal`` as the last event."""
        await self._send_all([RESPONSES.broken(refusal)])
        await self._data(b"", more=False)

    async def _send_all(self, events: Iterable[SseEvent]) -> None:
        """Send events to the client, each with its name and its JSON object."""
        for event in events:
            assert not isinstance(event.data, str), "responses send objects"
            await self._data(f"event: {event.name}\n".encode() + _encode_event(event.data), more=True)


def make_engine_refusal(death: ComponentDied) -> Refusal:
    """Return the refusal, with status 503, of a request after the death of the engine."""
    return Refusal(death.problem, remedy=death.remedy, status=503, code="engine_died")


def _encode_event(tree: Json) -> bytes:
    """Return a JSON object as the bytes of one server-sent event without a name."""
    return b"data: " + json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _count_sampled(pieces: list[list[ChoicePiece]]) -> int:
    """Return the number of sampled tokens in the pieces of all choices."""
    return sum(piece.tokens.num_sampled for parts in pieces for piece in parts)


def _name_token(token: int) -> str:
    """Return ``token_id:N`` as the text of a token, for requests with ``return_tokens_as_token_ids``, since two tokens
    may have the same text."""
    return f"token_id:{token}"
