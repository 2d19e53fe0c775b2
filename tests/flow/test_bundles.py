"""Episodes that ended together to bytes and back, token for token, and what is counted of them on the way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.base.types.episode import Branch, EpisodeGraph, EpisodeKey, StopReason, Turn
from headrace.base.types.recorded import KeptSets, Routing
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN, NOT_SAMPLED, mixed_version
from headrace.flow.ledger.bundles import MOST_TOKENS, decode_episode, encode_bundle, split_by_tokens
from headrace.flow.ledger.turns import decode_turns, encode_turns
from tests.flow.episodes import as_told, ended, sampled

VERSIONS = st.sampled_from([NOT_SAMPLED, FROZEN, mixed_version(0), mixed_version(3), 0, 2, 7])


@st.composite
def episodes(draw: st.DrawFn) -> list[EpisodeGraph]:
    made = []
    for place in range(draw(st.integers(1, 5))):
        turns = []
        for index in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, 5))
            tokens = Tokens(
                ids_T=draw(arrays.arrays(np.int32, size)),
                logprobs_T=draw(arrays.arrays(np.float32, size)),
                versions_T=draw(arrays.arrays(np.int32, size, elements=VERSIONS)),
            )
            parent = draw(st.none() | st.integers(0, index - 1)) if index else None
            reason = draw(st.none() | st.sampled_from(StopReason))
            turns.append(Turn(author=draw(st.text(max_size=5)), tokens=tokens, parent=parent, stop_reason=reason))
        made.append(EpisodeGraph(key=EpisodeKey(0, place), turns=turns))
    return made


@given(episodes())
def test_every_episode_comes_back_bit_for_bit_and_is_counted_as_it_counts_itself(
    given_episodes: list[EpisodeGraph],
) -> None:
    data, told = encode_bundle(given_episodes)
    for entry, episode in enumerate(given_episodes):
        back = EpisodeGraph(key=episode.key, turns=decode_episode(data, entry))
        assert as_told(back) == as_told(episode)
        assert told[entry].count == episode.num_sampled
        assert (told[entry].oldest, told[entry].newest) == (episode.versions() or (None, None))


def test_what_few_turns_have_stays_with_its_own_turn() -> None:
    routing = Routing.unknown(4, num_layers=2, top_k=1, dtype=np.dtype(np.uint8))
    rare = [
        {"reward": 0.5, "untrained": "not_chosen", "failed": True, "process": -1.0, "teacher": "math"},
        {"branch": Branch(1, 2, None), "context_routing": routing},
    ]
    columns = [
        {"entropies_T": np.arange(4) / 2, "kept": KeptSets.none(4)},
        {"routing": routing},
    ]
    plain = ended(0, 0)
    told = ended(0, 1)
    for more, column in zip(rare, columns, strict=True):
        tokens = msgspec.structs.replace(told.turns[1].tokens, **column)
        told.turns.append(msgspec.structs.replace(told.turns[1], tokens=tokens, **more))
    data, _ = encode_bundle([plain, told, plain])
    assert decode_episode(data, 0)[1].reward is None
    first, second = decode_episode(data, 1)[2:]
    assert (first.reward, first.untrained, first.failed, first.process) == (0.5, "not_chosen", True, -1.0)
    assert (first.teacher, second.teacher) == ("math", "")
    assert [turn.teacher for turn in decode_turns(encode_turns([first, second]))] == ["math", ""]
    assert first.tokens.entropies_T is not None
    assert first.tokens.entropies_T.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert first.tokens.kept is not None
    assert first.tokens.routing is None
    assert second.branch == Branch(1, 2, None)
    assert second.context_routing is not None
    assert second.tokens.routing is not None
    assert len(second.context_routing) == len(second.tokens.routing) == 4
    assert [turn.untrained for turn in decode_episode(data, 2)] == ["", ""]


def test_who_reads_one_episode_never_reads_many_long_ones() -> None:
    short, long = ended(0, 0), ended(0, 1, tokens=sampled(MOST_TOKENS))
    assert [len(each) for each in split_by_tokens([short] * 3)] == [3]
    assert [len(each) for each in split_by_tokens([short, long, short, short])] == [1, 1, 2]
    assert list(split_by_tokens([])) == []


@pytest.mark.parametrize("data", [b"", b"\x91", b"\x99\x01\x02\x03", b"\xc1"])
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_episode(data, 0)


def test_an_entry_that_is_not_there_is_refused() -> None:
    data, _ = encode_bundle([ended(0, 0)])
    with pytest.raises(msgspec.ValidationError):
        decode_episode(data, 1)
