"""Encoding and decoding of bundles. A bundle contains the turns of several episodes, stored column by column. A bundle
of the ledger contains episodes that were recorded together. A bundle for the learner contains episodes of one group,
and may be in a file.

    the bundle of a group:  | sizes | ids | logprobs | versions | the other columns, encoded | padding |

Shape legend: E episodes, K turns of all episodes in order, N tokens of all turns in order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from headrace.base.types.episode import Branch, EpisodeGraph, StopReason, Turn
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens, ViewedTokens
from headrace.base.types.versions import FROZEN, NOT_SAMPLED, oldest

MOST_TOKENS = 4096
"""Greatest number of tokens in a bundle of the ledger, unless a single episode has more. A larger bundle would make
reading one episode slower, because the whole bundle must be decoded."""
_GREATEST_VERSION = np.iinfo(np.int32).max
_SIZES = struct.Struct("<qq")
"""The format of the first bytes of a group's bundle: the number of tokens N, and the number of bytes of the other
columns when they are encoded."""
_TOKEN_BYTES = 12
"""Number of bytes of one token in the columns of ids, logprobs and versions of a group's bundle."""
_ALIGNMENT = 8
"""The bundle of a group is padded to a multiple of this number of bytes, so that its columns are aligned in a file."""


class RareFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a turn and of its tokens that have their default value in most turns. They are stored only for the
    other turns."""

    context_routing: Routing | None = None
    """The experts of every token before the turn; ``None`` if they were not recorded."""
    failed: bool = False
    untrained: str = ""
    reward: float | None = None
    """The part of the episode's reward that was earned in this turn; ``None`` if it is unknown."""
    process: float | None = None
    """The process reward of a segment; ``None`` if there is none."""
    branch: Branch | None = None
    """The branch of a resampled turn; ``None`` for a turn of the episode itself."""
    teacher: str = ""
    extra: dict[str, Any] = {}
    kept: KeptSets | None = None
    """The kept-set of each token; ``None`` if none was recorded."""
    routing: Routing | None = None
    """The experts that computed each token; ``None`` if none were recorded."""
    entropies_T: FloatColumn | None = None
    """The entropy in nats at each token; ``None`` if no token has a record."""
    teacher_scores: TeacherScores | None = msgspec.field(default=None, name="taught")  # its name in stored runs
    """A teacher's scores of the tokens; ``None`` if no teacher scored any."""


_NO_RARE_FIELDS = RareFields()


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
    more: dict[int, RareFields]
    """The rare fields of the turns that have any, by the index of the turn in the bundle."""


_CODEC = MessageCodec(_Bundle)
_VIEWS = MessageCodec(_Bundle, views=True)
"""The codec of the bundles of groups: what is laid out from them is copied once, into the batch."""
_NO_INTS, _NO_FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The number of sampled tokens of one episode, and the range of their versions."""

    count: int
    """Number of sampled tokens."""
    oldest: int | None
    """The oldest version of the trained policy that sampled a token; ``None`` if that policy sampled none."""
    newest: int | None
    """The newest version of the trained policy that sampled a token; ``None`` if that policy sampled none."""


def split_by_tokens(
    episodes: Sequence[EpisodeGraph], most_tokens: int = MOST_TOKENS
) -> Iterator[Sequence[EpisodeGraph]]:
    """Split ``episodes`` into consecutive parts of at most ``most_tokens`` tokens, and yield each part, from which the
    caller makes one bundle or one message. An episode that has more tokens is a part of its own."""
    begin = tokens = 0
    for place, episode in enumerate(episodes):
        size = sum([len(turn.tokens.ids_T) for turn in episode.turns])
        if place > begin and tokens + size > most_tokens:
            yield episodes[begin:place]
            begin, tokens = place, 0
        tokens += size
    if episodes:
        yield episodes[begin:]


def encode_bundle(episodes: Sequence[EpisodeGraph]) -> tuple[bytes, list[Sampled]]:
    """Return the bytes of one bundle of ``episodes`` and, for each episode, the number and the versions of its sampled
    tokens."""
    bundle = _bundle(episodes)
    return _CODEC.encode(bundle), _sampled(bundle)


def encode_group(episodes: Sequence[EpisodeGraph]) -> bytes:
    """Return the bytes of one bundle of ``episodes``, which belong to one group. The columns of ids, logprobs and
    versions are not compressed, and are aligned, so that they can be used without a copy."""
    bundle = _bundle(episodes)
    columns = (bundle.ids_N, bundle.logprobs_N, bundle.versions_N)
    rest = _CODEC.encode(msgspec.structs.replace(bundle, ids_N=_NO_INTS, logprobs_N=_NO_FLOATS, versions_N=_NO_INTS))
    num_tokens = len(bundle.ids_N)
    padding = -(_SIZES.size + _TOKEN_BYTES * num_tokens + len(rest)) % _ALIGNMENT
    return b"".join([_SIZES.pack(num_tokens, len(rest)), *(each.data for each in columns), rest, bytes(padding)])


class GroupBundle:
    """The decoded bundle of a group. Its columns are views of its bytes. Its methods except :meth:`turns` raise
    ``IndexError`` for the index of an episode that the bundle does not contain."""

    def __init__(self, data: memoryview) -> None:
        """Decode ``data``, the bytes that :func:`encode_group` returned. Raises ``msgspec.MsgspecError`` for other
        bytes."""
        with _invalid():
            num_tokens, rest_bytes = _SIZES.unpack_from(data)
            if min(num_tokens, rest_bytes) < 0:
                raise ValueError("the bundle of a group with a negative size")
            end = _SIZES.size + _TOKEN_BYTES * num_tokens
            rest: _Bundle = _VIEWS.decode(data[end : end + rest_bytes])
            ids_N, logprobs_N, versions_N = _columns(data)
            self._bundle = msgspec.structs.replace(rest, ids_N=ids_N, logprobs_N=logprobs_N, versions_N=versions_N)
            """The columns of the group; ids, logprobs and versions are views of the data."""
            _refuse_negative(rest, 0)
            self._ends_E = list(accumulate(rest.turns_E, initial=0))
            """The index of the first turn of each episode, and the number of all turns."""
            self._ends_K = list(accumulate(rest.lengths_K, initial=0))
            """The index of the first token of each turn, and the number of all tokens."""
            counts = {len(rest.lengths_K), len(rest.authors_K), len(rest.parents_K), len(rest.stops_K)}
            if counts != {self._ends_E[-1]} or self._ends_K[-1] != num_tokens:
                raise ValueError(f"a bundle of {num_tokens} tokens whose columns do not fit each other")

    def turns(self, index: int) -> list[Turn]:
        """Return the turns of the episode with the index ``index``. Raises ``msgspec.MsgspecError`` if the index does
        not exist or a rare column does not fit the turns."""
        with _invalid():
            return _turns(self._bundle, index)

    def plain_tokens(self, index: int) -> Tokens | None:
        """Return the tokens of the episode with the index ``index``, one turn after the other, if its turns form one
        path and have no rare fields, as the turns of most episodes do; otherwise return ``None``."""
        bundle, first, last = self._bundle, self._ends_E[index], self._ends_E[index + 1]
        parents = bundle.parents_K[first:last]
        if parents[:1] != [None] or parents[1:] != list(range(last - first - 1)):
            return None
        if bundle.more and any(place in bundle.more for place in range(first, last)):
            return None
        at = slice(self._ends_K[first], self._ends_K[last])
        return Tokens(ids_T=bundle.ids_N[at], logprobs_T=bundle.logprobs_N[at], versions_T=bundle.versions_N[at])

    def lengths(self, index: int) -> list[int]:
        """Return the number of tokens of each turn of the episode with the index ``index``."""
        return self._bundle.lengths_K[self._ends_E[index] : self._ends_E[index + 1]]

    def authors(self, index: int) -> list[str]:
        """Return the author of each turn of the episode with the index ``index``."""
        return self._bundle.authors_K[self._ends_E[index] : self._ends_E[index + 1]]


@contextmanager
def _invalid() -> Iterator[None]:
    """Convert an error in the body, which is caused by columns that do not fit each other, to an error of msgspec."""
    try:
        yield
    except (ValueError, IndexError, OverflowError, struct.error) as error:
        raise msgspec.ValidationError(str(error)) from None


def _refuse_negative(bundle: _Bundle, index: int) -> None:
    """Raise ``ValueError`` if a length in ``bundle`` or the index ``index`` is negative, or if the token ids have more
    than one dimension."""
    if min([index, *bundle.turns_E, *bundle.lengths_K]) < 0 or bundle.ids_N.ndim != 1:
        raise ValueError("a bundle with a negative length, or whose tokens are not a column")


def _columns(data: memoryview) -> tuple[IntColumn, FloatColumn, IntColumn]:
    """Return views of the ids, logprobs and versions in ``data``, the bundle of a group."""
    num_tokens, _ = _SIZES.unpack_from(data)
    ids_N = np.frombuffer(data, np.int32, num_tokens, _SIZES.size)
    logprobs_N = np.frombuffer(data, np.float32, num_tokens, _SIZES.size + ids_N.nbytes)
    versions_N = np.frombuffer(data, np.int32, num_tokens, _SIZES.size + 2 * ids_N.nbytes)
    return ids_N, logprobs_N, versions_N


def attach_columns(data: memoryview, episodes: Sequence[EpisodeGraph]) -> list[EpisodeGraph]:
    """Return copies of ``episodes`` whose ids, logprobs and versions are views of ``data``, the bytes that
    :func:`encode_group` returned for these episodes. No column is read. The copies do not contain the other columns of
    tokens, because only the learner needs those columns, and it decodes ``data``."""
    ids_N, logprobs_N, versions_N = _columns(data)
    begin = 0
    viewed: list[EpisodeGraph] = []
    for episode in episodes:
        turns: list[Turn] = []
        for turn in episode.turns:
            at = slice(begin, begin + len(turn.tokens.ids_T))
            tokens = ViewedTokens(
                ids_T=ids_N[at],
                logprobs_T=logprobs_N[at],
                versions_T=versions_N[at],
                known_sampled=turn.tokens.num_sampled,
            )
            turns.append(msgspec.structs.replace(turn, tokens=tokens, context_routing=None))
            begin = at.stop
        viewed.append(replace(episode, turns=turns))
    return viewed


def _bundle(episodes: Sequence[EpisodeGraph]) -> _Bundle:
    """Return one bundle of ``episodes``."""
    turns = [turn for episode in episodes for turn in episode.turns]
    spans = [turn.tokens for turn in turns] or [Tokens.observed([])]
    rare = {place: rare for place, turn in enumerate(turns) if (rare := rare_fields(turn)) is not _NO_RARE_FIELDS}
    return _Bundle(
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


def decode_episode(data: bytes, index: int) -> list[Turn]:
    """Return the turns of the episode with the index ``index`` in the bundle ``data``. Raises ``msgspec.MsgspecError``
    if ``data`` is not a valid bundle or the index does not exist."""
    with _invalid():
        return _turns(_CODEC.decode(data), index)


def _turns(bundle: _Bundle, index: int) -> list[Turn]:
    """Return the turns of the episode with the index ``index`` in ``bundle``. Raises ``ValueError`` or ``IndexError``
    if the columns of the bundle do not fit each other or the index does not exist."""
    _refuse_negative(bundle, index)
    first = sum(bundle.turns_E[:index])
    begin = sum(bundle.lengths_K[:first])
    turns: list[Turn] = []
    for turn in range(first, first + bundle.turns_E[index]):
        end = begin + bundle.lengths_K[turn]
        turns.append(_turn(bundle, turn, slice(begin, end)))
        begin = end
    return turns


def rare_fields(turn: Turn) -> RareFields:
    """Return the rare fields of a turn; the object ``_NO_RARE_FIELDS`` if all of them have their default values."""
    span = turn.tokens
    plain_turn = turn.context_routing is None and turn.reward is None and turn.process is None and turn.branch is None
    plain_span = span.kept is None and span.routing is None and span.entropies_T is None and span.teacher_scores is None
    if plain_turn and plain_span and not turn.failed and not turn.untrained and not turn.teacher and not turn.extra:
        return _NO_RARE_FIELDS
    return RareFields(
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


def _turn(bundle: _Bundle, index: int, span: slice) -> Turn:
    """Return the turn with the index ``index`` among the turns of a bundle. The slice ``span`` selects its tokens among
    the bundle's tokens. Raises ``ValueError`` if the slice ends behind the last token."""
    if span.stop > len(bundle.ids_N):
        raise ValueError(f"turn {index} ends at token {span.stop} of {len(bundle.ids_N)}")
    return make_turn(
        bundle.more.get(index, _NO_RARE_FIELDS),
        author=bundle.authors_K[index],
        columns=(bundle.ids_N[span], bundle.logprobs_N[span], bundle.versions_N[span]),
        parent=bundle.parents_K[index],
        stop_reason=bundle.stops_K[index],
    )


def make_turn(
    rare: RareFields,
    *,
    author: str,
    columns: tuple[IntColumn, FloatColumn, IntColumn],
    parent: int | None,
    stop_reason: StopReason | None,
) -> Turn:
    """Return a turn of ``author`` with the ids, logprobs and versions of its tokens in ``columns``. Raises
    ``ValueError`` if the columns differ in length."""
    ids_T, logprobs_T, versions_T = columns
    return Turn(
        author=author,
        tokens=Tokens(
            ids_T=ids_T,
            logprobs_T=logprobs_T,
            versions_T=versions_T,
            kept=rare.kept,
            routing=rare.routing,
            entropies_T=rare.entropies_T,
            teacher_scores=rare.teacher_scores,
        ),
        parent=parent,
        stop_reason=stop_reason,
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
