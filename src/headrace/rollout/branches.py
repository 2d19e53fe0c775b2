"""Branches of an episode: functions that split a turn where a branch leaves it, and a token source that samples
branches.

    task ── answer        ▶        task ── kept ──┬── rest of the answer
                                                  ├── branch 0 ── ...
                                                  └── branch 1 ── ...

A *branch* continues the first tokens of a turn, the *kept* tokens, with newly sampled tokens. The kept part becomes a
turn of its own. Several paths share that turn, and it is trained once.
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
    """A token source for one branch. It asks the engine to *fork* the sequence that contains the kept tokens, which
    means to continue that sequence from an earlier token with its key-value cache.

    The fork of request ``parent`` uses the weights that filled the request's cache, and stays pinned to them. The
    branch is sampled from the kept token ids without a fork if those weights are no longer in use, if the engine has
    discarded the request, or if ``parent`` is ``None``. The engine then computes the kept tokens again with its current
    weights, and ``on_prefix`` is called. ``name`` is mixed into the sampling seed, so that each branch has its own
    random draws.
    """

    def __init__(self, engine: TokenSource, *, parent: int | None, name: str, on_prefix: Callable[[], None]) -> None:
        """Create a source that samples from ``engine``. The other parameters are explained at the class."""
        self._engine = engine
        self._parent = parent
        self._name = name
        self._on_prefix = on_prefix

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        """Sample one sequence and yield its chunks; see :class:`~headrace.engine.base.Engine`. A request with kept
        tokens (``options.answer_ids_T``) continues them as a fork. A request without kept tokens is sent to the engine
        unchanged, apart from its seed."""
        digest = hashlib.blake2b(f"{sampling.seed}/{self._name}".encode(), digest_size=8).digest()
        # a seed is a signed 64-bit integer, so the digest is shifted by one bit
        sampling = msgspec.structs.replace(sampling, seed=int.from_bytes(digest, "big") >> 1)
        kept_T = options.answer_ids_T
        if kept_T is None:
            async for chunk in self._engine.generate(prompt_ids_T, sampling, options):
                yield chunk
            return
        options, has_chunks = msgspec.structs.replace(options, pinned=True), False
        if self._parent is not None:
            fork = ForkRequest(parent=self._parent, at=len(kept_T))
            rest = msgspec.structs.replace(sampling, max_new_tokens=sampling.max_new_tokens - len(kept_T))
            fork_options = msgspec.structs.replace(options, fork=fork, answer_ids_T=None)
            try:
                async for chunk in self._engine.generate(_NONE, rest, fork_options):
                    has_chunks = True
                    yield chunk
                return
            except RequestError:
                if has_chunks:
                    raise
        self._on_prefix()
        async for chunk in self._engine.generate(prompt_ids_T, sampling, options):
            yield chunk


def split(turns: list[Turn], index: int, ends: Sequence[int]) -> None:
    """Split turn ``index`` of an episode, in place, into a chain of ``len(ends) + 1`` turns. Each of them ends before
    one of the token positions ``ends``; the last of them ends where the original turn ended. Turns that continued the
    original turn now continue the last part. The last part also keeps the stop reason and the reward."""
    original, num_added = turns[index], len(ends)
    bounds = [0, *ends, len(original.tokens)]
    pieces = [msgspec.structs.replace(original, tokens=original.tokens[: bounds[1]])]
    for number in range(1, num_added + 1):
        tokens = original.tokens[bounds[number] : bounds[number + 1]]
        pieces.append(msgspec.structs.replace(original, tokens=tokens, parent=index + number - 1, context_routing=None))
    pieces[:-1] = [msgspec.structs.replace(piece, stop_reason=StopReason.SPLIT, reward=None) for piece in pieces[:-1]]
    later = [msgspec.structs.replace(turn, parent=_shift(turn.parent, index, num_added)) for turn in turns[index + 1 :]]
    turns[index:] = [*pieces, *later]


def _shift(parent: int | None, index: int, num_added: int) -> int | None:
    """Return the new index of the parent turn ``parent`` after ``num_added`` turns were inserted at ``index``.
    ``None``, for a turn without a parent, stays ``None``."""
    return parent if parent is None or parent < index else parent + num_added


def repeats(turns: Sequence[Turn], index: int, at: int, attempt: Sequence[Turn]) -> bool:
    """Return whether the turns of ``attempt`` repeat the kept part of an episode and continue after it. The kept part
    consists of ``turns`` up to token ``at`` of turn ``index``."""
    if len(attempt) <= index or len(attempt[index].tokens) <= at:
        return False
    pairs = zip(turns[: index + 1], attempt[: index + 1], strict=True)
    return all(
        turn.parent == repeated.parent
        and np.array_equal(
            _kept_ids(turn, at if number == index else None), _kept_ids(repeated, at if number == index else None)
        )
        for number, (turn, repeated) in enumerate(pairs)
    )


def _kept_ids(turn: Turn, end: int | None) -> IntColumn:
    """Return the ids of the first ``end`` tokens of ``turn``; of all its tokens if ``end`` is ``None``."""
    return turn.tokens.ids_T[:end]


def graft(turns: list[Turn], index: int, at: int, attempt: Sequence[Turn], branch: Branch) -> None:
    """Append a new branch to ``turns``, in place. The branch consists of the turns of ``attempt`` from turn ``index``
    on, without the first ``at`` tokens of that turn, and it continues turn ``index`` of ``turns``, which has already
    been split at that position. Every appended turn records ``branch``."""
    base = len(turns)
    for turn in attempt[index:]:
        first = len(turns) == base
        # parents before turn ``index`` are shared with ``turns``; later parents were appended here and have new indices
        has_kept_parent = turn.parent is None or turn.parent < index
        turns.append(
            msgspec.structs.replace(
                turn,
                tokens=turn.tokens[at:] if first else turn.tokens,
                parent=index if first else turn.parent if has_kept_parent else _shift(turn.parent, index, base - index),
                context_routing=None if first else turn.context_routing,
                reward=None,
                branch=branch,
            )
        )
