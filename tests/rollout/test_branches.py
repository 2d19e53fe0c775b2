"""Turns that others leave: cut, with what comes after them in its place, and the branches below."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.base.clock import run_virtual
from headrace.base.errors import RequestError
from headrace.base.types.episode import Branch, EpisodeGraph, EpisodeKey, StopReason, Turn
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import paths
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.rollout.branches import Forking, graft, repeats, split


def sampled(*ids: int, parent: int | None, version: int = 0) -> Turn:
    tokens = Tokens(ids_T=ids, logprobs_T=[-0.5] * len(ids), versions_T=[version] * len(ids))
    return Turn(author="policy", tokens=tokens, parent=parent, stop_reason=StopReason.STOP, reward=1.0)


def observed(*ids: int, parent: int | None) -> Turn:
    return Turn(author="user", tokens=Tokens.observed(ids), parent=parent)


def conversation() -> list[Turn]:
    """Two answers, the first of which is continued twice."""
    return [
        observed(1, 2, parent=None),
        sampled(3, 4, 5, 6, parent=0),
        observed(7, parent=1),
        sampled(8, 9, parent=2),
        observed(10, parent=1),
        sampled(11, parent=4),
    ]


def path_ids(turns: list[Turn]) -> list[list[int]]:
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=turns)
    return sorted(episode.path_tokens(episode.path(leaf)).ids_T.tolist() for leaf in episode.leaves())


@given(ends=st.sets(st.integers(1, 3)), index=st.sampled_from([1, 3]))
def test_cutting_a_turn_changes_no_path(ends: set[int], index: int) -> None:
    turns = conversation()
    ends = {end for end in ends if end < len(turns[index].tokens)}
    split(turns, index, sorted(ends))
    assert path_ids(turns) == path_ids(conversation())
    assert len(turns) == len(conversation()) + len(ends)
    assert all(turn.parent is None or turn.parent < place for place, turn in enumerate(turns))
    pieces = turns[index : index + len(ends) + 1]
    assert [piece.stop_reason for piece in pieces] == [StopReason.SPLIT] * len(ends) + [StopReason.STOP]
    assert [piece.reward for piece in pieces] == [None] * len(ends) + [1.0]


def test_branches_hang_where_they_left_and_what_is_shared_is_trained_once() -> None:
    turns = conversation()
    attempts = [
        [*conversation()[:1], sampled(3, 4, 30 + n, parent=0), observed(40, parent=1), sampled(50, parent=2)]
        for n in range(2)
    ]
    deeper = [*conversation()[:3], sampled(8, 60, 61, parent=2)]
    # pivots from the back to the front: in turn 3 behind token 1, in turn 1 behind token 2
    split(turns, 3, [1])
    graft(turns, 3, 1, deeper, Branch(pivot=1, number=0, reward=1.0))
    split(turns, 1, [2])
    for number, attempt in enumerate(attempts):
        marked = [replace(turn, untrained="" if number else "branch_failed") for turn in attempt]
        graft(turns, 1, 2, marked, Branch(pivot=0, number=number, reward=0.0))
    grown = [[1, 2, 3, 4, 30, 40, 50], [1, 2, 3, 4, 31, 40, 50], [1, 2, 3, 4, 5, 6, 7, 8, 60, 61]]
    assert path_ids(turns) == sorted([*path_ids(conversation()), *grown])
    episode = EpisodeGraph(key=EpisodeKey(0, 0), turns=turns)
    samples = paths(episode, [0.0] * len(turns))
    trained = sum(int(sample.mask_T.sum()) for sample in samples)
    assert trained == 4 + 2 + 1 + (1 + 1) + 2  # the episode; of two branches the one that carries loss; the deeper one
    assert {turn.branch.number for turn in turns if turn.branch and turn.branch.pivot == 0} == {0, 1}
    assert episode.length == 7


@pytest.mark.parametrize(
    ("attempt", "same"),
    [
        ([observed(1, 2, parent=None), sampled(3, 4, 9, parent=0)], True),
        ([observed(1, 2, parent=None), sampled(3, 4, parent=0)], False),
        ([observed(1, 2, parent=None), sampled(3, 9, 9, parent=0)], False),
        ([observed(1, 9, parent=None), sampled(3, 4, 9, parent=0)], False),
        ([observed(1, 2, parent=None), sampled(3, 4, 9, parent=None)], False),
        ([observed(1, 2, parent=None)], False),
    ],
)
def test_an_attempt_is_a_branch_only_if_it_repeats_the_episode_up_to_the_pivot(attempt: list[Turn], same: bool) -> None:
    assert repeats(conversation(), 1, 2, attempt) == same


class Remembering:
    """Answers with one token, unless it is asked to fork and ``fails``."""

    def __init__(self, fails: int = 0) -> None:
        self.asked: list[tuple[list[int], Sampling, RequestOptions]] = []
        self._fails = fails

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self.asked.append((prompt_ids_T.tolist(), sampling, options))
        tokens = Tokens(ids_T=[5], logprobs_T=[-1.0], versions_T=[2])
        if options.fork is not None and self._fails:
            if self._fails == 2:
                yield TokenChunk(tokens=tokens)
            raise RequestError("its cache is not of version 2", remedy="send a prompt")
        yield TokenChunk(tokens=tokens, stop_reason=StopReason.STOP)


def ask(engine: Remembering, parent: int | None, **options: Any) -> tuple[list[TokenChunk], list[str]]:
    told: list[str] = []

    async def answer() -> list[TokenChunk]:
        forking = Forking(engine, parent=parent, name="0/1", on_prefix=lambda: told.append("prefix"))
        asked = RequestOptions(session="s", **options)
        return [chunk async for chunk in forking.generate(np.array([1, 2]), Sampling(max_new_tokens=9, seed=4), asked)]

    return run_virtual(answer()), told


KEPT = {"answer_ids_T": np.array([3, 4], np.int32)}


def test_a_branch_is_forked_from_its_parent_and_pinned() -> None:
    engine = Remembering()
    assert ask(engine, 7, **KEPT)[1] == []
    ((prompt, sampling, options),) = engine.asked
    assert (prompt, sampling.max_new_tokens, options.pinned) == ([], 7, True)
    assert (options.fork.parent, options.fork.at, options.answer_ids_T, options.session) == (7, 2, None, "s")
    assert sampling.seed != 4


@pytest.mark.parametrize("parent", [7, None])
def test_a_branch_whose_parents_cache_is_gone_goes_on_from_its_tokens_and_says_so(parent: int | None) -> None:
    engine = Remembering(fails=1)
    chunks, told = ask(engine, parent, **KEPT)
    assert (len(chunks), told) == (1, ["prefix"])
    prompt, sampling, options = engine.asked[-1]
    assert (prompt, sampling.max_new_tokens, options.pinned, options.fork) == ([1, 2], 9, True, None)
    assert options.answer_ids_T.tolist() == [3, 4]


def test_a_branch_that_breaks_off_is_not_begun_again() -> None:
    with pytest.raises(RequestError, match="not of version 2"):
        ask(Remembering(fails=2), 7, **KEPT)


def test_other_turns_of_a_branch_have_draws_of_their_own_and_are_neither_forked_nor_pinned() -> None:
    engine = Remembering()
    ask(engine, 7)
    ((prompt, sampling, options),) = engine.asked
    assert (prompt, options.fork, options.pinned) == ([1, 2], None, False)
    assert sampling.seed != 4
