"""The sampling of choices. A choice is one of the answers to a request. It is one sequence of the engine, which arrives
in pieces of text with their tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from headrace.base.tasks import task_group
from headrace.base.types.columns import IntColumn
from headrace.base.types.episode import StopReason, TokenChunk
from headrace.base.types.messages.engine import RequestOptions
from headrace.base.types.sampling import Sampling
from headrace.base.types.teacher_scores import TopScores
from headrace.base.types.tokens import Tokens
from headrace.engine.base import Engine
from headrace.engine.text import Decode, Detokenizer, StopFinder
from headrace.wings.serve.calls import CallFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """The settings of an echo: a choice that begins with its prompt (``echo`` of a completion request)."""

    alone: bool
    """Whether the choice is the prompt alone, without sampled tokens."""
    scored: bool
    """Whether logprobs are returned for the tokens of the prompt."""
    num_top: int
    """The number of likeliest entries that are returned for each token of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """A request to the engine for one choice."""

    index: int
    """The choice's place in the answer."""
    prompt_ids_T: IntColumn
    sampling: Sampling
    options: RequestOptions
    """The options of the request to the engine, such as its priority."""
    echo: Echo | None = None
    """The settings of the echo; ``None`` for a choice without its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePiece:
    """A piece of a choice: the tokens and the text that were added since the previous piece."""

    index: int
    """The choice's place in the answer."""
    tokens: Tokens
    """The tokens as sampled. The prompt of an echo counts as not sampled; its logprobs are computed by the model at
    temperature 1, and the logprob of its first token is NaN."""
    text: str
    """The new text that later tokens cannot change, without stop strings. It may belong to tokens of earlier pieces."""
    offsets: list[int] = field(default_factory=list)
    """Position of each token's text within the choice's text, in characters; empty unless requested."""
    top: TopScores | None = None
    """The model's likeliest entries at each token; ``None`` unless requested."""
    calls: tuple[tuple[str, str], ...] = ()
    """The calls of tools, in the last piece: the name and the arguments (JSON text) of each. Their text is not part of
    ``text``."""
    stop_reason: StopReason | None = None
    """The reason why the choice ended, in its last piece; ``None`` in earlier pieces."""
    restarted: bool = False
    """Whether the choice was sampled again from its start, so that all its earlier pieces must be discarded."""

    @classmethod
    def concat(cls, pieces: Sequence[ChoicePiece]) -> ChoicePiece:
        """Return all ``pieces`` of one choice, in order, as one piece with the whole text and all tokens."""
        last = pieces[-1]
        return cls(
            index=last.index,
            tokens=Tokens.concat([piece.tokens for piece in pieces]),
            text="".join(piece.text for piece in pieces),
            offsets=[offset for piece in pieces for offset in piece.offsets],
            top=TopScores.concat([piece.top for piece in pieces if piece.top]) if last.top else None,
            calls=last.calls,
            stop_reason=last.stop_reason,
        )


Emit = Callable[[ChoicePiece], Awaitable[None]]
"""A function that receives each piece of a choice as soon as it is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The options for the text of the choices of one request."""

    decode: Decode
    """A function that returns the text of token ids."""
    streaming: bool
    """Whether each piece contains the text of its tokens; otherwise the last piece contains all text."""
    offsets: bool
    """Whether the position of each token in the text is computed."""
    finder: Callable[[], CallFinder] | None = None
    """A function that creates the filter that finds calls of tools in a choice; ``None``: all text is content."""


async def sample_all(engine: Engine, requests: Sequence[ChoiceRequest], text_options: TextOptions, emit: Emit) -> None:
    """Sample ``requests`` concurrently with ``engine`` and pass their pieces to ``emit``; the pieces of one choice
    arrive in order. If one choice fails, the others are cancelled, and its error is raised. ``text_options`` are the
    options for their text."""
    async with task_group() as group:
        for request in requests:  # all start before the first await, so they join the batch together
            group.create_task(_sample(engine, request, text_options, emit))


async def _sample(engine: Engine, request: ChoiceRequest, text_options: TextOptions, emit: Emit) -> None:
    """Sample the choice of ``request`` with ``engine``, and pass its pieces to ``emit`` in order; ``text_options`` are
    the options for its text. If the request includes an echo, the first piece is the prompt. If the engine samples the
    choice again from its start, the text is assembled again from the start."""
    length = 0
    if request.echo is not None:
        echoed = await _make_echo_piece(engine, request, request.echo, text_options)
        await emit(echoed)
        if request.echo.alone:
            return
        length = len(echoed.text)
    text = _Text(request.sampling.stop, text_options, length)
    async with aclosing(engine.generate(request.prompt_ids_T, request.sampling, request.options)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.lost:
                text = _Text(request.sampling.stop, text_options, length)
            piece = text.piece(request.index, chunk)
            await emit(piece)
            if piece.stop_reason is not None:
                return


async def _make_echo_piece(
    engine: Engine, request: ChoiceRequest, echo: Echo, text_options: TextOptions
) -> ChoicePiece:
    """Return the prompt of the choice of ``request`` as its first piece, with logprobs from a forward pass of the model
    of ``engine`` if ``echo.scored``. ``text_options`` are the options for its text."""
    tokens = Tokens.observed(request.prompt_ids_T)
    top: TopScores | None = None
    if echo.scored:
        top = await engine.top_scores(tokens, echo.num_top)
        logprobs_T = top.logprobs_T.copy()
        logprobs_T[0] = np.nan  # nothing precedes the first token
        tokens = msgspec.structs.replace(tokens, logprobs_T=logprobs_T)
    text = _Text((), text_options)
    chunk = TokenChunk(
        tokens=tokens, top=top if echo.num_top else None, stop_reason=StopReason.LENGTH if echo.alone else None
    )
    piece = text.piece(request.index, chunk)
    rest = "" if echo.alone else text.rest()
    return replace(piece, text=piece.text + rest)


class _Text:
    """The detokenization of one choice: it converts each chunk of tokens from the engine to a piece with text."""

    def __init__(self, stops: Sequence[str], text_options: TextOptions, length: int = 0) -> None:
        """Create the text of one choice with ``text_options``. ``stops`` are the stop strings; ``length`` is the number
        of characters of the echoed prompt before this text."""
        self._text_options = text_options
        self._detokenizer = Detokenizer(text_options.decode)
        """Converts tokens to text that later tokens cannot change."""
        self._finder = StopFinder(stops)
        """Finds stop strings in the text."""
        self._calls = None if text_options.finder is None else text_options.finder()
        """Finds calls of tools in the text; ``None`` if all text is content."""
        self._length = length
        """Number of characters of the choice so far."""
        self._held_back_ids: list[int] = []
        """Tokens whose text is held back, because it may belong to a stop string or a call."""

    def piece(self, index: int, chunk: TokenChunk) -> ChoicePiece:
        """Return the piece that a chunk of tokens adds to the choice number ``index``. Text that may belong to a stop
        string or to a call of a tool is held back until later tokens decide."""
        ids, reason = chunk.tokens.ids_T.tolist(), chunk.stop_reason
        text, offsets = "", list[int]()
        if self._text_options.offsets:
            for token in ids:
                offsets.append(self._length)
                text += self._push([token])
        elif self._text_options.streaming or reason is not None:
            text = self._push([*self._held_back_ids, *ids])
        else:
            self._held_back_ids += ids
        if reason is not None:
            text += self._detokenizer.end()
        cut = self._finder.push(text)
        if cut.stopped:
            reason = StopReason.STOP
        elif reason is not None:
            cut = self._finder.last(cut)
        text, calls = cut.text, tuple[tuple[str, str], ...]()
        if self._calls is not None:
            text, calls = self._calls.push(text, ended=reason is not None)
        return ChoicePiece(
            index=index,
            tokens=chunk.tokens,
            text=text,
            offsets=offsets,
            top=chunk.top,
            calls=calls,
            stop_reason=reason,
            restarted=bool(chunk.lost),
        )

    def rest(self) -> str:
        """Return the remaining text after the last token of a prompt."""
        return self._push(self._held_back_ids) + self._detokenizer.end()

    def _push(self, ids: list[int]) -> str:
        """Append tokens; return the text that later tokens cannot change, and add its length to the length of the
        choice."""
        text = self._detokenizer.push(ids)
        self._length += len(text)
        return text
