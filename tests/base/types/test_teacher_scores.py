"""What a teacher says stays with the tokens that it is about, however they are cut and joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey, Turn
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import NOT_SAMPLED
from headrace.flow.layout import UNTAUGHT, drop_untaught
from headrace.flow.ledger.turns import decode_turns, encode_turns


def said(first: int, count: int, num: int = 2) -> Tokens:
    """Tokens ``first``, ``first + 1``, ..., of each of which the teacher says its id."""
    ids = np.arange(first, first + count, dtype=np.int32)
    taught = TeacherScores(
        logprobs_T=-ids.astype(np.float32),
        versions_T=np.zeros(count, np.int32),
        ids_TK=np.repeat(ids[:, None], num, axis=1),
        logs_TK=-np.repeat(ids[:, None], num, axis=1).astype(np.float32),
    )
    return Tokens(ids_T=ids, logprobs_T=-np.ones(count), versions_T=np.full(count, 3), teacher_scores=taught)


def fits(tokens: Tokens) -> bool:
    """Whether every token that was taught has what was said of it."""
    assert tokens.teacher_scores is not None
    taught, known_T = tokens.teacher_scores, tokens.teacher_scores.known_T
    return bool(
        (-taught.logprobs_T[known_T] == tokens.ids_T[known_T]).all()
        and (taught.ids_TK[known_T] == tokens.ids_T[known_T][:, None]).all()
        and (taught.versions_T[~known_T] == NOT_SAMPLED).all()
    )


@given(sizes=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6), data=st.data())
def test_cutting_and_joining_keeps_every_token_with_its_teacher(
    sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    parts, first = [], 1
    for count, taught in sizes:
        parts.append(said(first, count) if taught else Tokens.observed(range(first, first + count)))
        first += count
    whole = Tokens.concat(parts)
    if not any(taught for _, taught in sizes):
        assert whole.teacher_scores is None
        return
    at = data.draw(st.integers(0, len(whole)))
    assert fits(whole)
    assert fits(whole[at:])
    again = whole[:at] + whole[at:]
    assert again.teacher_scores is not None
    assert whole.teacher_scores is not None
    np.testing.assert_array_equal(again.teacher_scores.logprobs_T, whole.teacher_scores.logprobs_T)
    num_taught = sum(count for count, taught in sizes if taught)
    assert int(whole.teacher_scores.known_T.sum()) == num_taught


def test_of_lessons_with_fewer_entries_the_likeliest_that_all_have_are_kept() -> None:
    whole = said(1, 2, num=4) + said(3, 2, num=2) + said(5, 1, num=0)
    assert whole.teacher_scores is not None
    assert whole.teacher_scores.ids_TK.shape == (5, 2)
    assert whole.teacher_scores.known_T.tolist() == [True, True, True, True, False]
    assert fits(whole)


def test_what_a_teacher_said_lies_in_the_ledger_and_goes_into_the_batch() -> None:
    turns = [Turn(author="task", tokens=Tokens.observed([1, 2])), Turn(author="policy", tokens=said(3, 3), parent=0)]
    back = decode_turns(encode_turns(turns))
    assert back[0].tokens.teacher_scores is None
    assert fits(back[1].tokens)
    tokens = back[0].tokens + back[1].tokens
    sample = TrainSample(key=EpisodeKey(0, 0), spans=(tokens,), mask_T=tokens.sampled_T, advantage=1.0)
    batch = Batch.collate(0, [sample, sample])
    assert batch.teacher_scores is not None
    assert batch.teacher_scores.known_T.tolist() == [False, False, True, True, True] * 2


def test_lessons_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="a teacher's scores of 2 tokens for 3 tokens"):
        Tokens(ids_T=[1, 2, 3], logprobs_T=[0, 0, 0], versions_T=[1, 1, 1], teacher_scores=said(1, 2).teacher_scores)


def test_tokens_that_were_scored_before_there_was_a_teacher_lose_their_loss_and_are_counted() -> None:
    taught, before = said(3, 3), Tokens(ids_T=[7, 8], logprobs_T=[-1, -1], versions_T=[3, 3])
    samples = [
        TrainSample(key=EpisodeKey(0, place), spans=(tokens,), mask_T=tokens.sampled_T, advantage=1.0)
        for place, tokens in enumerate((taught, before))
    ]
    batch, counted = drop_untaught(Batch.collate(0, samples))
    assert batch.mask_N.tolist() == [True, True, True, False, False]
    assert counted == {UNTAUGHT: 2}
    untouched = Batch.collate(0, samples[1:])
    assert drop_untaught(untouched) == (untouched, {})
