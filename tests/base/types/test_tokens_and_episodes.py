"""Tokens, turns and samples: aligned at birth, identical ever after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.group import GroupState
from headrace.base.types.scored import ScoredGroup, paths
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED


def sampled(*ids: int, version: int = 0) -> Tokens:
    return Tokens(ids_T=ids, logprobs_T=[-0.25 * token for token in ids], versions_T=[version] * len(ids))


@pytest.mark.parametrize("column", ["ids_T", "logprobs_T", "versions_T"])
@pytest.mark.parametrize("wrong", [[1], [1, 2, 3], [[1, 2]], []])
def test_columns_that_do_not_align_are_refused_at_birth(column: str, wrong: list[int]) -> None:
    columns: dict[str, object] = {"ids_T": [1, 2], "logprobs_T": [0.0, 0.0], "versions_T": [0, 0]}
    with pytest.raises(ValueError, match="tokens"):
        Tokens(**{**columns, column: wrong})


def test_columns_have_their_dtype_whatever_they_were_given_as() -> None:
    tokens = Tokens(ids_T=np.array([1, 2], np.int64), logprobs_T=[0, -1], versions_T=np.array([3, 3], np.int16))
    assert (tokens.ids_T.dtype, tokens.logprobs_T.dtype, tokens.versions_T.dtype) == (np.int32, np.float32, np.int32)


def test_observed_tokens_were_sampled_by_nobody() -> None:
    tokens = Tokens.observed([4, 5])
    assert tokens.versions_T.tolist() == [NOT_SAMPLED, NOT_SAMPLED]
    assert not tokens.sampled_T.any()
    assert len(Tokens.concat([])) == len(Tokens.observed([])) == 0


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=5))
def test_concatenation_keeps_every_token_in_its_place(parts: list[list[int]]) -> None:
    joined = Tokens.concat([sampled(*part, version=place) for place, part in enumerate(parts)])
    assert joined.ids_T.tolist() == [token for part in parts for token in part]
    assert joined.versions_T.tolist() == [place for place, part in enumerate(parts) for _ in part]


def branching(status: EpisodeStatus = EpisodeStatus.SCORED) -> EpisodeGraph:
    """task ─ first ─┬─ left
    └─ tool ─ right"""
    return EpisodeGraph(
        key=EpisodeKey(7, 2),
        turns=[
            Turn(author="task", tokens=Tokens.observed([1, 2])),
            Turn(author="policy", tokens=sampled(10, 11, version=3), parent=0),
            Turn(author="policy", tokens=sampled(20, version=4), parent=1),
            Turn(author="tool", tokens=Tokens.observed([30]), parent=1),
            Turn(author="policy", tokens=sampled(40, 41, version=5), parent=3),
        ],
        status=status,
        reward=1.0,
    )


def test_turn_that_two_branches_share_is_trained_once() -> None:
    left, right = paths(branching(), advantage=0.5)
    assert left.tokens.ids_T.tolist() == [1, 2, 10, 11, 20]
    assert left.mask_T.tolist() == [False, False, True, True, True]
    assert right.tokens.ids_T.tolist() == [1, 2, 10, 11, 30, 40, 41]
    assert right.mask_T.tolist() == [False, False, False, False, False, True, True]
    assert int(left.mask_T.sum() + right.mask_T.sum()) == branching().num_sampled == 5


@given(st.data())
def test_every_sampled_token_of_any_graph_carries_loss_exactly_once(data: st.DataObject) -> None:
    turns = [Turn(author="task", tokens=Tokens.observed([0]))]
    for index in range(1, data.draw(st.integers(1, 8))):
        parent = data.draw(st.integers(0, index - 1))
        is_policy = data.draw(st.booleans())
        ids = [index] * data.draw(st.integers(1, 3))
        tokens = sampled(*ids) if is_policy else Tokens.observed(ids)
        turns.append(Turn(author="policy" if is_policy else "tool", tokens=tokens, parent=parent))
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=turns)
    samples = paths(episode, 1.0)
    trained = sorted(token for s in samples for token in s.tokens.ids_T[s.mask_T].tolist())
    assert trained == sorted(token for turn in turns for token in turn.tokens.ids_T[turn.tokens.sampled_T].tolist())
    assert 1 <= len(samples) <= len(episode.leaves())
    assert len(samples) == 1 or all(sample.mask_T.any() for sample in samples)  # a path without loss is no sample
    assert all(sample.tokens.ids_T[0] == 0 for sample in samples)


def test_episode_knows_its_leaves_its_paths_and_its_versions() -> None:
    episode = branching()
    assert episode.leaves() == [2, 4]
    assert episode.path(4) == [0, 1, 3, 4]
    assert episode.versions() == (3, 5)
    assert EpisodeGraph(key=EpisodeKey(0, 0), turns=episode.turns[:1]).versions() is None
    assert str(episode.key) == "7.2"


def test_group_is_as_old_as_its_oldest_scored_token() -> None:
    young = EpisodeGraph(key=EpisodeKey(7, 0), turns=branching().turns[4:], status=EpisodeStatus.SCORED, reward=0.0)
    failed = branching(EpisodeStatus.FAILED)
    assert ScoredGroup(number=7, episodes=(young, branching())).oldest_version() == 3
    assert ScoredGroup(number=7, episodes=(young, failed)).oldest_version() == 5
    assert ScoredGroup(number=7, episodes=(failed,)).oldest_version() is None


def sample(group: int, place: int, *ids: int, advantage: float = 1.0) -> TrainSample:
    tokens = Tokens.observed([9]) + sampled(*ids, version=group)
    return TrainSample(key=EpisodeKey(group, place), spans=(tokens,), mask_T=tokens.sampled_T, advantage=advantage)


def test_batch_lays_its_samples_out_one_after_the_other() -> None:
    samples = [sample(4, 0, 1, 2, advantage=-1.0), sample(4, 1, 3), *paths(branching(), 0.5), sample(4, 0, 5)]
    batch = Batch.collate(6, samples)
    assert batch.lengths_S.tolist() == [3, 2, 5, 7, 2]
    assert batch.groups_S.tolist() == [0, 0, 1, 1, 0]
    assert batch.episodes_S.tolist() == [0, 1, 2, 2, 0]
    assert batch.ids_N.tolist() == [9, 1, 2, 9, 3, 1, 2, 10, 11, 20, 1, 2, 10, 11, 30, 40, 41, 9, 5]
    assert batch.num_tokens == 19
    assert batch.num_loss_tokens == 2 + 1 + 3 + 2 + 1
    assert batch.advantages_N[:5].tolist() == [-1.0, -1.0, -1.0, 1.0, 1.0]
    assert batch.ages().tolist() == [2, 2, 2, 3, 3, 2, 1, 1, 2]
    columns = (batch.mask_N, batch.logprobs_N, batch.versions_N, batch.advantages_N)
    assert all(len(column) == batch.num_tokens for column in columns)


def test_batch_of_nothing_has_no_tokens() -> None:
    batch = Batch.collate(0, [])
    assert (batch.num_tokens, batch.num_loss_tokens, batch.ages().tolist()) == (0, 0, [])


LIFE = [
    GroupState.SUBMITTED,
    GroupState.ADMITTED,
    GroupState.RUNNING,
    GroupState.SCORED,
    GroupState.READY,
    GroupState.TAKEN,
    GroupState.TRAINED,
    GroupState.RELEASED,
]


def test_life_of_a_group_is_the_one_in_the_picture() -> None:
    for here in GroupState:
        arrows = {there for there in GroupState if here.may_become(there)}
        place = LIFE.index(here) if here in LIFE else len(LIFE)
        expected = set(LIFE[place + 1 : place + 2])
        if place <= LIFE.index(GroupState.TAKEN):
            expected.add(GroupState.DROPPED)
        assert arrows == expected, here


def test_slot_is_held_from_admission_to_release_and_flight_ends_with_training() -> None:
    assert [state for state in GroupState if state.holds_slot] == LIFE[1:7]
    assert [state for state in GroupState if state.in_flight] == LIFE[:6]


def test_episode_has_ended_when_it_is_scored_or_will_never_be_trained() -> None:
    going_on = [status for status in EpisodeStatus if not status.ended]
    assert going_on == [EpisodeStatus.RUNNING, EpisodeStatus.FINISHED]
    untrained = [status for status in EpisodeStatus if status.untrained]
    assert untrained == [EpisodeStatus.FAILED, EpisodeStatus.LEFT_OUT, EpisodeStatus.MASKED]


@pytest.mark.parametrize("count", [0, 1, 4096, 4097])
def test_given_tokens_are_unsampled_however_many_there_are(count: int) -> None:
    span = Tokens.observed(range(count))
    assert span.ids_T.tolist() == list(range(count))
    assert span.logprobs_T.tolist() == [0.0] * count
    assert span.versions_T.tolist() == [NOT_SAMPLED] * count
    assert (span.logprobs_T.dtype, span.versions_T.dtype) == (np.float32, np.int32)
