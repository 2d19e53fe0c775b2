"""Encoding and decoding of turns, of parts of running turns, and of the learner's results for tokens, as bytes that the
ledger stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk, Turn
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.scored import TokenResults
from headrace.base.types.stored import Stored
from headrace.base.types.tokens import FloatColumn, IntColumn, Tokens
from headrace.flow.ledger.bundles import RareFields, decode_episode, make_turn, rare_fields


class _Turn(RareFields, frozen=True, kw_only=True, omit_defaults=False):
    """The stored form of one turn, with the columns of its tokens."""

    author: str
    ids_T: IntColumn
    logprobs_T: FloatColumn
    versions_T: IntColumn
    parent: int | None
    stop_reason: StopReason | None


EPISODE_COLUMNS = "status, cause, reward, reward_parts, agent_rewards, turns, entry"
"""The columns of the tables ``episodes`` and ``bundles`` that describe one episode, in the order of
:func:`decode_episode_row`."""
_CODEC = MessageCodec(list[_Turn])
_LEARNED = MessageCodec(TokenResults | Stored)


def encode_turns(turns: Sequence[Turn]) -> bytes:
    """Return ``turns`` encoded as the bytes that the ledger stores."""
    return _CODEC.encode(
        [
            _Turn(
                author=turn.author,
                ids_T=turn.tokens.ids_T,
                logprobs_T=turn.tokens.logprobs_T,
                versions_T=turn.tokens.versions_T,
                parent=turn.parent,
                stop_reason=turn.stop_reason,
                **msgspec.structs.asdict(rare_fields(turn)),
            )
            for turn in turns
        ]
    )


def decode_turns(data: bytes, index: int | None = None) -> list[Turn]:
    """Return the turns of one episode, decoded from the bytes ``data`` of the ledger. ``index`` is the index of the
    episode if ``data`` is a bundle of several episodes; ``None`` if ``data`` contains the turns of one episode only.
    Raises ``msgspec.MsgspecError`` if ``data`` is not valid."""
    if index is not None:
        return decode_episode(data, index)
    try:
        return [_decoded_turn(turn) for turn in _CODEC.decode(data)]
    except ValueError as error:  # columns of different lengths
        raise msgspec.ValidationError(str(error)) from None


def _decoded_turn(stored: _Turn) -> Turn:
    """Return the turn that the stored form ``stored`` describes."""
    return make_turn(
        stored,
        author=stored.author,
        columns=(stored.ids_T, stored.logprobs_T, stored.versions_T),
        parent=stored.parent,
        stop_reason=stored.stop_reason,
    )


def decode_episode_row(key: EpisodeKey, row: Sequence[Any]) -> EpisodeGraph:
    """Return the episode ``key`` with its turns. ``row`` has the values of :data:`EPISODE_COLUMNS`."""
    status, cause, reward, parts, agents, turns, entry = row
    return EpisodeGraph(
        key=key,
        turns=decode_turns(turns, entry),
        status=EpisodeStatus(status),
        reward=reward,
        parts=json.loads(parts),
        agent_rewards=json.loads(agents),
        cause=cause,
    )


def encode_part(part: TokenChunk) -> bytes:
    """Return a part of a running turn (its tokens since the previous part) encoded as the bytes that the ledger
    stores."""
    turn = Turn(
        author="", tokens=part.tokens, stop_reason=part.stop_reason, context_routing=part.prompt_routing
    )  # fmt: skip
    return encode_turns([turn])


def join_parts(key: EpisodeKey, turn: int, prompt: str, parts: Sequence[bytes]) -> TokenChunk:
    """Return all recorded parts of one turn, joined into one chunk. ``key`` is the key of the episode, ``turn`` the
    index of the turn among its sampled turns, ``prompt`` the digest of the tokens before the turn, and ``parts`` the
    stored bytes of each part, in order."""
    decoded = [part for data in parts for part in decode_turns(data)]
    routings = (part.context_routing for part in decoded if part.context_routing is not None)
    return TokenChunk(
        key=key,
        turn=turn,
        prompt=prompt,
        tokens=Tokens.concat([part.tokens for part in decoded]),
        stop_reason=decoded[-1].stop_reason,
        prompt_routing=next(routings, None),
    )


def encode_token_results(learned: TokenResults | Stored) -> bytes:
    """Return ``learned``, the learner's results for the tokens of one step, as the bytes that the ledger stores; or, if
    these bytes lie in the store of the run, the reference to them as bytes."""
    return _LEARNED.encode(learned)


def decode_token_results(blob: bytes | memoryview) -> TokenResults | Stored:
    """Return the learner's results, or the reference to them, that :func:`encode_token_results` encoded as ``blob``."""
    learned: TokenResults | Stored = _LEARNED.decode(blob)
    return learned
