"""What a batch's episodes come to, in columns."""

import numpy as np

from headrace.base.types.episode import Branch, EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.control.metrics.batch import batch_stats


def sampled(length: int, author: str = "policy", reason: StopReason = StopReason.STOP, branch: int = -1) -> Turn:
    tokens = Tokens(
        ids_T=np.arange(length, dtype=np.int32),
        logprobs_T=np.zeros(length, np.float32),
        versions_T=np.zeros(length, np.int32),
    )
    of_branch = None if branch < 0 else Branch(pivot=0, number=branch, reward=1.0)
    return Turn(author=author, tokens=tokens, stop_reason=reason, branch=of_branch)


def episode(number: int, place: int, *turns: Turn, reward: float | None, ended_s: float | None = None) -> EpisodeGraph:
    given = Turn(author="task", tokens=Tokens.observed([1, 2, 3]))
    status = EpisodeStatus.FAILED if reward is None else EpisodeStatus.SCORED
    made = EpisodeGraph(key=EpisodeKey(number, place), turns=[given, *turns], status=status, reward=reward)
    made.ended_s = ended_s
    return made


def test_lengths_turns_rewards_and_ends_are_those_of_the_episodes() -> None:
    long = episode(0, 0, sampled(4), sampled(3, "judge", StopReason.LENGTH), reward=1.0, ended_s=5.0)
    branched = episode(0, 1, sampled(2), sampled(9, branch=0), reward=0.0, ended_s=6.0)
    failed = episode(1, 0, sampled(8), reward=None, ended_s=9.0)
    resumed = episode(1, 1, sampled(1), reward=0.5)
    stats = batch_stats([
        ScoredGroup(number=0, episodes=(long, branched)), ScoredGroup(number=1, episodes=(failed, resumed))
    ])  # fmt: skip
    assert stats.episodes == [long, branched, resumed]
    assert (stats.columns.lengths, stats.columns.turns, stats.columns.rewards) == (
        [7, 2, 1],
        [2, 1, 1],
        [1.0, 0.0, 0.5],
    )
    assert (stats.sizes, stats.truncated, stats.authors) == ([2, 1], 1, {"policy", "judge"})
    assert stats.ends_s == [5.0, 6.0, 9.0]  # one that failed may be the straggler, too


def test_a_group_is_equal_where_all_that_is_compared_is() -> None:
    def of(number: int, *rewards: float | None) -> ScoredGroup:
        made = [episode(number, place, sampled(1), reward=reward) for place, reward in enumerate(rewards)]
        return ScoredGroup(number=number, episodes=tuple(made))

    apart = of(4, 0.5, 0.5)
    for each, earned in zip(apart.episodes, (0.0, 1.0), strict=True):
        each.agent_rewards = {"policy": earned}
    groups = [of(0, 1.0, 1.0), of(1, 0.0, 1.0), of(2, 1.0, None), of(3, 1.0), apart]
    assert batch_stats(groups).equal == [True, False, True, False]  # a group of one says nothing
