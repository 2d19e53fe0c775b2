"""Choices: one sequence of the engine each, as pieces of text with their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.base.types.columns import IntColumn
from headrace.base.types.episode import StopReason
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import Tokens
from headrace.engine.base import Engine, RequestOptions, TokenChunk
from headrace.engine.text import Decode, Detokenizer, StopFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """One choice that is to be sampled."""

    index: int
    """Its place in the answer."""
    prompt_ids_T: IntColumn
    sampling: Sampling
    options: RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePiece:
    """What a choice has gained since its last piece."""

    index: int
    """The choice's place in the answer."""
    tokens: Tokens
    text: str
    """Certain and without stop strings; what it belongs to may be tokens of earlier pieces."""
    offsets: list[int] = field(default_factory=list)
    """Where each token's text begins in the choice's text, in characters; only if asked for."""
    stop_reason: StopReason | None = None
    """Set on the last piece."""
    restarted: bool = False
    """Forget everything before this piece."""


Emit = Callable[[ChoicePiece], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How pieces are wanted."""

    decode: Decode
    at_once: bool
    """Text with the piece of its tokens; else all of it with the last piece."""
    offsets: bool
    """Whether each token's place in the text is wanted."""


async def sample_all(engine: Engine, asked: Sequence[ChoiceRequest], manner: Manner, emit: Emit) -> None:
    """Sample all of them together; ``emit`` gets their pieces, those of one choice in order. Where one fails, the
    others are withdrawn, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in asked:  # all begin in one turn of the event loop, so they join the batch together
                group.create_task(_sample(engine, one, manner, emit))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _sample(engine: Engine, asked: ChoiceRequest, manner: Manner, emit: Emit) -> None:
    text = _Text(asked.sampling.stop, manner)
    async with aclosing(engine.generate(asked.prompt_ids_T, asked.sampling, asked.options)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            if chunk.restarted:
                text = _Text(asked.sampling.stop, manner)
            piece = text.piece(asked.index, chunk)
            await emit(piece)
            if piece.stop_reason is not None:
                return


class _Text:
    """The text of one choice as it grows."""

    def __init__(self, stops: Sequence[str], manner: Manner) -> None:
        self._manner = manner
        self._detokenizer = Detokenizer(manner.decode)
        self._finder = StopFinder(stops)
        self._length = 0
        self._late: list[int] = []

    def piece(self, index: int, chunk: TokenChunk) -> ChoicePiece:
        ids, reason = chunk.tokens.ids_T.tolist(), chunk.stop_reason
        text, offsets = "", []
        if self._manner.offsets:
            for token in ids:
                offsets.append(self._length)
                text += self._push([token])
        elif self._manner.at_once or reason is not None:
            text = self._push([*self._late, *ids])
        else:
            self._late += ids
        if reason is not None:
            text += self._detokenizer.end()
        cut = self._finder.push(text)
        if cut.stopped:
            reason = StopReason.STOP
        elif reason is not None:
            cut = self._finder.last(cut)
        return ChoicePiece(
            index=index,
            tokens=chunk.tokens,
            text=cut.text,
            offsets=offsets,
            stop_reason=reason,
            restarted=chunk.restarted,
        )

    def _push(self, ids: list[int]) -> str:
        text = self._detokenizer.push(ids)
        self._length += len(text)
        return text
