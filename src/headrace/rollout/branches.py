"""Turns that continue in more than one way: a turn is split where branches leave it.

    task ── answer        ▶        task ── kept ──┬── rest of the answer
                                                  ├── branch 0 ── ...
                                                  └── branch 1 ── ...

The kept part is one turn, so it is trained once, like every turn that several paths share.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import numpy as np

from headrace.base.errors import RequestError
from headrace.base.types.episode import Branch, StopReason, Turn
from headrace.base.types.messages.engine import ForkRequest
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions, TokenChunk, TokenSource

_NONE = np.zeros(0, np.int32)


class Forking:
    """A token source for one branch, which forks the sequence that holds the kept tokens: it continues that sequence
    from an earlier token, with its key-value cache.

    The fork of request ``parent`` uses the weights of that request's cache and stays pinned to them. If those weights
    are no longer in use, or the engine has forgotten the request (or ``parent`` is ``None``), the branch is sampled
    from the tokens alone: they are computed again, under the weights in use, and ``on_prefix`` is called. ``name``
    gives the branch draws of its own.
    """

    def __init__(self, engine: TokenSource, *, parent: int | None, name: str, on_prefix: Callable[[], None]) -> None:
        """Sample from ``engine`` as forks of its request ``parent``; ``None``: from the tokens alone."""
        self._engine = engine
        self._parent = parent
        self._name = name
        self._on_prefix = on_prefix

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence, in chunks; see :class:`~headrace.engine.base.Engine`. A request with kept tokens
        (``options.answer_ids_T``) continues them as a fork; one without is passed on."""
        digest = hashlib.blake2b(f"{sampling.seed}/{self._name}".encode(), digest_size=8).digest()
        sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "big") >> 1)
        kept_T = options.answer_ids_T
        if kept_T is None:
            async for chunk in self._engine.generate(prompt_ids_T, sampling, options):
                yield chunk
            return
        options, came = msgspec.structs.replace(options, pinned=True), False
        if self._parent is not None:
            fork = ForkRequest(parent=self._parent, at=len(kept_T))
            rest = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(kept_T))
            forked = msgspec.structs.replace(options, fork=fork, answer_ids_T=None)
            try:
                async for chunk in self._engine.generate(_NONE, rest, forked):
                    came = True
                    yield chunk
                return
            except RequestError:
                if came:
                    raise
        self._on_prefix()
        async for chunk in self._engine.generate(prompt_ids_T, sampling, options):
            yield chunk


def split(turns: list[Turn], index: int, ends: Sequence[int]) -> None:
    """Split turn ``index`` of an episode, in place, into a chain of turns: each ends before one of the token positions
    ``ends``, and the last at its own end. The turns that continued it now continue the last part, which keeps its stop
    reason and reward."""
    whole, added = turns[index], len(ends)
    bounds = [0, *ends, len(whole.tokens)]
    pieces = [msgspec.structs.replace(whole, tokens=whole.tokens[: bounds[1]])]
    for place in range(1, added + 1):
        tokens = whole.tokens[bounds[place] : bounds[place + 1]]
        pieces.append(msgspec.structs.replace(whole, tokens=tokens, parent=index + place - 1, context_routing=None))
    pieces[:-1] = [msgspec.structs.replace(piece, stop_reason=StopReason.SPLIT, reward=None) for piece in pieces[:-1]]
    later = [msgspec.structs.replace(turn, parent=_moved(turn.parent, index, added)) for turn in turns[index + 1 :]]
    turns[index:] = [*pieces, *later]


def _moved(parent: int | None, index: int, added: int) -> int | None:
    """Return the index of a turn, ``parent``, after ``added`` turns were inserted at ``index``; ``None``, for a turn
    without parent, stays ``None``."""
    return parent if parent is None or parent < index else parent + added


def repeats(turns: Sequence[Turn], index: int, at: int, attempt: Sequence[Turn]) -> bool:
    """Return whether ``attempt`` begins with ``turns`` up to token ``at`` of turn ``index``, and continues after it."""
    if len(attempt) <= index or len(attempt[index].tokens) <= at:
        return False
    before = zip(turns[: index + 1], attempt[: index + 1], strict=True)
    return all(
        here.parent == there.parent
        and np.array_equal(_kept_ids(here, place, index, at), _kept_ids(there, place, index, at))
        for place, (here, there) in enumerate(before)
    )


def _kept_ids(turn: Turn, place: int, index: int, at: int) -> IntColumn:
    """Return the ids of a turn that belong to the kept part of an episode, which ends before token ``at`` of turn
    ``index``. ``place`` is the index of ``turn``."""
    return turn.tokens.ids_T[:at] if place == index else turn.tokens.ids_T


def graft(turns: list[Turn], index: int, at: int, attempt: Sequence[Turn], branch: Branch) -> None:
    """Append the turns of ``attempt`` after its first ``at`` tokens of turn ``index`` to ``turns`` as a branch below
    that turn, which has been split there. ``branch`` is recorded in each of them."""
    base = len(turns)
    for turn in attempt[index:]:
        first = len(turns) == base
        shared = turn.parent is None or turn.parent < index
        turns.append(
            msgspec.structs.replace(
                turn,
                tokens=turn.tokens[at:] if first else turn.tokens,
                parent=index if first else turn.parent if shared else _moved(turn.parent, index, base - index),
                context_routing=None if first else turn.context_routing,
                reward=None,
                branch=branch,
            )
        )
