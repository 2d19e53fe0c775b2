"""Encoding and decoding of bundles. A bundle contains the turns of several episodes that were recorded together, stored
column by column in the ledger. An *entry* is the index of an episode in its bundle.

Shape legend: E episodes, K turns of all episodes in order, N tokens of all turns in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.base.types.episode import Branch, EpisodeGraph, StopReason, Turn
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.base.types.versions import FROZEN, NOT_SAMPLED, oldest

MOST_TOKENS = 4096
"""Greatest number of tokens in a bundle, unless a single episode has more. A larger bundle would make reading one
episode slower, because the whole bundle must be decoded."""
_GREATEST_VERSION = np.iinfo(np.int32).max


class _RareFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a turn and of its tokens that have their default value in most turns. They are stored only for the
    other turns."""

    context_routing: Routing | None = None
    failed: bool = False
    untrained: str = ""
    reward: float | None = None
    process: float | None = None
    branch: Branch | None = None
    teacher: str = ""
    extra: dict[str, Any] = {}
    kept: KeptSets | None = None
    routing: Routing | None = None
    entropies_T: FloatColumn | None = None
    teacher_scores: TeacherScores | None = msgspec.field(default=None, name="taught")  # its name in stored runs


_NO_RARE_FIELDS = _RareFields()


class _Bundle(msgspec.Struct, frozen=True, array_like=True):
    """The stored form of a bundle: one column for each field of its turns and tokens."""

    turns_E: list[int]
    """Number of turns of each episode."""
    lengths_K: list[int]
    """Number of tokens of each turn."""
    authors_K: list[str]
    parents_K: list[int | None]
    """The index within its episode of the turn that each turn continues; ``None`` for a root."""
    stops_K: list[StopReason | None]
    ids_N: IntColumn
    logprobs_N: FloatColumn
    versions_N: IntColumn
    more: dict[int, _RareFields]
    """The rare fields of the turns that have any, by the index of the turn in the bundle."""


_CODEC = MessageCodec(_Bundle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The number of sampled tokens of one episode, and the range of their versions."""

    count: int
    """Number of sampled tokens."""
    oldest: int | None
    """The oldest version of the trained policy that sampled a token; ``None`` if that policy sampled none."""
    newest: int | None
    """The newest version of the trained policy that sampled a token; ``None`` if that policy sampled none."""


def bundled(episodes: Sequence[EpisodeGraph]) -> Iterator[Sequence[EpisodeGraph]]:
    """Split ``episodes`` into consecutive parts of at most :data:`MOST_TOKENS` tokens, and yield each part, from which
    the caller makes one bundle."""
    begin = tokens = 0
    for place, episode in enumerate(episodes):
        size = sum([len(turn.tokens.ids_T) for turn in episode.turns])
        if place > begin and tokens + size > MOST_TOKENS:
            yield episodes[begin:place]
            begin, tokens = place, 0
        tokens += size
    if episodes:
        yield episodes[begin:]


def encode_bundle(episodes: Sequence[EpisodeGraph]) -> tuple[bytes, list[Sampled]]:
    """Return the bytes of one bundle of ``episodes`` and, for each episode, the number and the versions of its sampled
    tokens."""
    turns = [turn for episode in episodes for turn in episode.turns]
    spans = [turn.tokens for turn in turns] or [Tokens.observed([])]
    rare = {place: rare for place, turn in enumerate(turns) if (rare := _rare_fields(turn)) is not _NO_RARE_FIELDS}
    bundle = _Bundle(
        turns_E=[len(episode.turns) for episode in episodes],
        lengths_K=[len(turn.tokens.ids_T) for turn in turns],
        authors_K=[turn.author for turn in turns],
        parents_K=[turn.parent for turn in turns],
        stops_K=[turn.stop_reason for turn in turns],
        ids_N=np.concatenate([span.ids_T for span in spans]),
        logprobs_N=np.concatenate([span.logprobs_T for span in spans]),
        versions_N=np.concatenate([span.versions_T for span in spans]),
        more=rare,
    )
    return _CODEC.encode(bundle), _sampled(bundle)


def decode_entry(data: bytes, entry: int) -> list[Turn]:
    """Return the turns of the episode with the index ``entry`` in the bundle ``data``. Raises ``msgspec.MsgspecError``
    if ``data`` is not a valid bundle or the index does not exist."""
    try:
        bundle: _Bundle = _CODEC.decode(data)
        if min([entry, *bundle.turns_E, *bundle.lengths_K]) < 0 or bundle.ids_N.ndim != 1:
            raise ValueError("a bundle with a negative length, or whose tokens are not a column")
        first = sum(bundle.turns_E[:entry])
        begin = sum(bundle.lengths_K[:first])
        turns: list[Turn] = []
        for place in range(first, first + bundle.turns_E[entry]):
            end = begin + bundle.lengths_K[place]
            turns.append(_turn(bundle, place, slice(begin, end)))
            begin = end
        return turns
    except (ValueError, IndexError) as error:  # columns of different lengths
        raise msgspec.ValidationError(str(error)) from None


def _rare_fields(turn: Turn) -> _RareFields:
    """Return the rare fields of a turn; the object ``_NO_RARE_FIELDS`` if all of them have their default values."""
    span = turn.tokens
    plain_turn = turn.context_routing is None and turn.reward is None and turn.process is None and turn.branch is None
    plain_span = span.kept is None and span.routing is None and span.entropies_T is None and span.teacher_scores is None
    if plain_turn and plain_span and not turn.failed and not turn.untrained and not turn.teacher and not turn.extra:
        return _NO_RARE_FIELDS
    return _RareFields(
        context_routing=turn.context_routing,
        failed=turn.failed,
        untrained=turn.untrained,
        reward=turn.reward,
        process=turn.process,
        branch=turn.branch,
        teacher=turn.teacher,
        extra=turn.extra,
        kept=span.kept,
        routing=span.routing,
        entropies_T=span.entropies_T,
        teacher_scores=span.teacher_scores,
    )


def _turn(bundle: _Bundle, place: int, at: slice) -> Turn:
    """Return the turn with the index ``place`` among the turns of a bundle. The slice ``at`` selects its tokens among
    the bundle's tokens. Raises ``ValueError`` if the slice ends behind the last token."""
    if at.stop > len(bundle.ids_N):
        raise ValueError(f"turn {place} ends at token {at.stop} of {len(bundle.ids_N)}")
    rare = bundle.more.get(place, _NO_RARE_FIELDS)
    return Turn(
        author=bundle.authors_K[place],
        tokens=Tokens(
            ids_T=bundle.ids_N[at],
            logprobs_T=bundle.logprobs_N[at],
            versions_T=bundle.versions_N[at],
            kept=rare.kept,
            routing=rare.routing,
            entropies_T=rare.entropies_T,
            teacher_scores=rare.teacher_scores,
        ),
        parent=bundle.parents_K[place],
        stop_reason=bundle.stops_K[place],
        context_routing=rare.context_routing,
        failed=rare.failed,
        untrained=rare.untrained,
        reward=rare.reward,
        process=rare.process,
        branch=rare.branch,
        teacher=rare.teacher,
        extra=rare.extra,
    )


def _sampled(bundle: _Bundle) -> list[Sampled]:
    """Return, for each episode of a bundle, the number and the versions of its sampled tokens. The values equal
    :attr:`EpisodeGraph.num_sampled` and :meth:`EpisodeGraph.versions`, and are computed for all episodes at once, for
    speed."""
    ends_K = np.cumsum([0, *bundle.lengths_K])
    bounds_E = ends_K[np.cumsum([0, *bundle.turns_E])]
    versions_N = np.append(bundle.versions_N, NOT_SAMPLED)  # reduceat needs a valid start for an empty last episode
    sampled_N = versions_N != NOT_SAMPLED
    # tokens of a frozen agent are sampled, but have no version of the trained policy
    own_N = sampled_N & (versions_N != FROZEN)
    oldest_N = oldest(versions_N)
    starts_E = bounds_E[:-1]
    least_E = np.minimum.reduceat(np.where(own_N, oldest_N, _GREATEST_VERSION), starts_E)
    most_E = np.maximum.reduceat(np.where(own_N, oldest_N, NOT_SAMPLED), starts_E)
    # differences of cumulative sums, because reduceat returns a wrong value for an empty episode
    counts_E, own_E = (np.diff(np.append(0, np.cumsum(mask_N))[bounds_E]) for mask_N in (sampled_N, own_N))
    return [
        Sampled(count=count, oldest=least if own else None, newest=most if own else None)
        for count, own, least, most in zip(
            counts_E.tolist(), own_E.tolist(), least_E.tolist(), most_E.tolist(), strict=True
        )
    ]
