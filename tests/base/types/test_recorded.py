"""Kept-sets and routing: what an exact loss needs, aligned with the tokens and checked at their birth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, Turn
from headrace.base.types.messages.codec import MessageCodec
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import mixed_version
from headrace.flow.ledger.turns import decode_turns, encode_turns

SPANS = st.lists(st.lists(st.integers(0, 50), max_size=4, unique=True).map(sorted), min_size=1, max_size=12)


def routing(*rows: int | None) -> Routing:
    """One layer, one expert; ``None`` where it is not known."""
    known = [row for row in rows if row is not None]
    return Routing(
        known_T=np.array([row is not None for row in rows], bool),
        experts_RLK=np.array(known, np.uint8).reshape(len(known), 1, 1),
    )


def experts(of: Routing) -> list[int | None]:
    rows = iter(of.experts_RLK[:, 0, 0].tolist())
    return [next(rows) if known else None for known in of.known_T]


def sampled(*ids: int, routes: Routing | None = None, kept: KeptSets | None = None) -> Tokens:
    count = len(ids)
    return Tokens(ids_T=ids, logprobs_T=[-1.0] * count, versions_T=[0] * count, routing=routes, kept=kept)


@given(SPANS, st.data())
def test_selection_of_kept_sets_is_the_selection_of_their_spans(spans: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(spans) - 1), max_size=15))
    taken = KeptSets.from_spans(spans).take(np.array(places, np.int64))
    assert [span.tolist() for span in taken.spans()] == [spans[place] for place in places]


@given(st.lists(st.one_of(st.none(), st.integers(0, 255)), min_size=1, max_size=12), st.data())
def test_any_selection_of_routing_keeps_what_is_known(rows: list[int | None], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=15))
    assert experts(routing(*rows).take(np.array(places, np.int64))) == [rows[place] for place in places]


def test_kept_set_without_the_sampled_token_is_refused_at_birth() -> None:
    with pytest.raises(ValueError, match="kept-set of token 1 does not hold the sampled id 5"):
        sampled(4, 5, kept=KeptSets.from_spans([[], [4, 6]]))


@pytest.mark.parametrize("count", [1, 3])
def test_recorded_columns_of_another_length_are_refused_at_birth(count: int) -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        sampled(4, 5, kept=KeptSets.none(count))
    with pytest.raises(ValueError, match="2 tokens"):
        sampled(4, 5, routes=routing(*[1] * count))


def test_tokens_without_records_beside_tokens_with_them_have_empty_ones() -> None:
    joined = Tokens.observed([1, 2]) + sampled(7, kept=KeptSets.from_spans([[7, 9]]), routes=routing(3))
    assert joined.kept is not None
    assert joined.routing is not None
    assert [span.tolist() for span in joined.kept.spans()] == [[], [], [7, 9]]
    assert experts(joined.routing) == [None, None, 3]


def test_turns_come_back_from_the_ledger_with_all_that_was_recorded() -> None:
    tokens = sampled(7, 8, kept=KeptSets.from_spans([[7, 9], []]), routes=routing(3, None))
    turn = Turn(author="policy", tokens=tokens, parent=0, context_routing=routing(1, 2))
    (found,) = decode_turns(encode_turns([turn]))
    assert found.tokens.kept is not None
    assert found.tokens.routing is not None
    assert found.context_routing is not None
    assert [span.tolist() for span in found.tokens.kept.spans()] == [[7, 9], []]
    assert (experts(found.tokens.routing), experts(found.context_routing)) == ([3, None], [1, 2])


def test_context_of_the_last_turn_fills_in_what_earlier_turns_could_not_know() -> None:
    episode = EpisodeGraph(
        key=EpisodeKey(0, 0),
        turns=[
            Turn(author="task", tokens=Tokens.observed([1, 2])),
            Turn(
                author="policy",
                tokens=sampled(3, 4, routes=routing(13, None)),
                parent=0,
                context_routing=routing(11, 12),
            ),
            Turn(author="tool", tokens=Tokens.observed([5]), parent=1),
            Turn(
                author="policy",
                tokens=sampled(6, 7, routes=routing(16, None)),
                parent=2,
                context_routing=routing(11, 12, 13, 14, 15),
            ),
        ],
    )
    whole = episode.path_tokens([0, 1, 2, 3]).routing
    first = episode.path_tokens([0, 1]).routing
    assert whole is not None
    assert first is not None
    assert experts(whole) == [11, 12, 13, 14, 15, 16, None]
    assert experts(first) == [11, 12, 13, None]


def test_turn_that_recorded_nothing_leaves_the_tokens_as_they_are() -> None:
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=[Turn(author="task", tokens=Tokens.observed([1, 2]))])
    assert episode.path_tokens([0]).routing is None


def test_batch_carries_records_of_every_token_and_travels_with_them() -> None:
    tokens = Tokens.observed([1]) + sampled(7, kept=KeptSets.from_spans([[7, 9]]), routes=routing(300 % 256))
    sample = TrainSample(key=EpisodeKey(0, 0), spans=(tokens,), mask_T=tokens.sampled_T, advantage=1.0)
    plain = TrainSample(
        key=EpisodeKey(0, 1), spans=(Tokens.observed([2]),), mask_T=np.zeros(1, bool), advantage=0.0
    )  # fmt: skip
    batch = Batch.collate(3, [sample, plain])
    codec = MessageCodec(Batch)
    found = codec.decode(codec.encode(batch))
    assert [span.tolist() for span in found.kept.spans()] == [[], [7, 9], []]
    assert experts(found.routing) == [None, 44, None]


def test_age_of_a_token_of_mixed_weights_counts_from_the_older_ones() -> None:
    tokens = Tokens(ids_T=[1, 2], logprobs_T=[-1.0, -1.0], versions_T=[4, mixed_version(3)])
    sample = TrainSample(key=EpisodeKey(0, 0), spans=(tokens,), mask_T=tokens.sampled_T, advantage=0.0)
    batch = Batch.collate(5, [sample])
    assert batch.ages().tolist() == [1, 2]
