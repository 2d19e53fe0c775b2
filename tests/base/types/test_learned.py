"""What the learner made of each token finds its way back to the token, through paths, branches and drops."""

import numpy as np

from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, Turn
from headrace.base.types.scored import ScoredGroup, TokenResults
from headrace.base.types.teacher_scores import TeacherScores
from headrace.base.types.tokens import Tokens
from headrace.flow.layout import collate, drop_stale
from headrace.flow.ledger.turns import decode_token_results, encode_token_results


def sampled(ids: list[int], version: int = 3) -> Tokens:
    return Tokens(
        ids_T=np.array(ids), logprobs_T=-np.array(ids, np.float32), versions_T=np.full(len(ids), version, np.int32)
    )


def episode(group: int, place: int, turns: list[Turn]) -> EpisodeGraph:
    return EpisodeGraph(key=EpisodeKey(group, place), turns=turns, status=EpisodeStatus.SCORED, reward=1.0)


def tree() -> list[Turn]:
    """A prompt, an answer, and two ways on from it; one answer of them is not trained."""
    return [
        Turn(author="task", tokens=Tokens.observed([90, 91])),
        Turn(author="policy", tokens=sampled([1, 2]), parent=0),
        Turn(author="user", tokens=Tokens.observed([92]), parent=1),
        Turn(author="policy", tokens=sampled([3, 4, 5]), parent=2),
        Turn(author="policy", tokens=sampled([6]), parent=2, untrained="not_chosen"),
        Turn(author="policy", tokens=sampled([7, 8], version=1), parent=1),
    ]


def test_each_gap_is_that_of_its_own_token() -> None:
    plain = [Turn(author="task", tokens=Tokens.observed([90])), Turn(author="policy", tokens=sampled([9]), parent=0)]
    failed = EpisodeGraph(key=EpisodeKey(5, 1), turns=plain, status=EpisodeStatus.FAILED)
    groups = [
        ScoredGroup(number=5, episodes=(episode(5, 0, tree()), failed)),
        ScoredGroup(number=7, episodes=(episode(7, 1, plain), episode(7, 2, tree()))),
    ]
    batch = collate(4, groups, [0.5, -0.5, 0.5])
    trained, stale = drop_stale(batch, 2)
    assert stale
    log_pi_N = np.where(trained.mask_N, 100.0 * batch.ids_N, np.nan).astype(np.float32)
    learned = TokenResults.from_batch([each.key for group in groups for each in group.scored], batch, log_pi_N)
    for each in (groups[0].episodes[0], groups[1].episodes[1]):
        gaps = {turn: column_T.tolist() for turn, column_T in learned.gaps(each).items()}
        assert gaps.pop(1) == [101.0, 202.0]
        assert gaps.pop(3) == [303.0, 404.0, 505.0]
        assert np.isnan(gaps.pop(5)).all()  # too old: it lost its loss
        assert not gaps
    assert {turn: column_T.tolist() for turn, column_T in learned.gaps(groups[1].episodes[0]).items()} == {1: [909.0]}
    assert learned.gaps(failed) == {}


def test_what_a_teacher_beside_the_learner_says_is_that_of_its_own_token() -> None:
    groups = [ScoredGroup(number=number, episodes=(episode(number, 0, tree()),)) for number in (5, 7)]
    batch = collate(4, groups, [0.5, -0.5])
    teacher_scores_N = TeacherScores(
        logprobs_T=np.where(batch.mask_N, -10.0 * batch.ids_N, np.nan).astype(np.float32),
        versions_T=np.where(batch.mask_N, batch.episodes_S.repeat(batch.lengths_S), -1).astype(np.int32),
        ids_TK=np.zeros((batch.num_tokens, 0), np.int32),
        logs_TK=np.zeros((batch.num_tokens, 0), np.float32),
    )
    keys = [group.episodes[0].key for group in groups]
    learned = decode_token_results(
        encode_token_results(TokenResults.from_batch(keys, batch, batch.logprobs_N, teacher_scores_N))
    )
    for version, group in enumerate(groups):
        taught = learned.teacher_scores(group.episodes[0])
        assert {turn: each.logprobs_T.tolist() for turn, each in taught.items()} == {
            1: [-10.0, -20.0],
            3: [-30.0, -40.0, -50.0],
            5: [-70.0, -80.0],
        }
        assert {int(each) for said in taught.values() for each in said.versions_T} == {version}
    assert TokenResults.from_batch(keys, batch, batch.logprobs_N).teacher_scores(groups[0].episodes[0]) == {}
