"""Process rewards: turns are scored while their episode is still running, hold nothing up, and are credited to their
turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algo.config import AlgoConfig
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.task import Task
from headrace.base.types.tokens import Tokens
from headrace.control import Components
from headrace.control.credit import credit
from headrace.flow.layout import collate
from headrace.rollout.environments import AttemptOutcome, OpenEpisode
from headrace.rollout.scoring import Graded
from headrace.testing import FakeEngine, FakeScorer
from tests.control.lives import Life, Plan, live


class ThreeTurns:
    """Asks three times, and gives one token in between."""

    begins_with_prompt = True

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        prompt_T = task.prompt_ids_T
        for number in range(3):
            reply = await episode.sample(prompt_T)
            said_T = np.array(reply.token_ids, np.int32)
            prompt_T = np.concatenate([prompt_T, said_T, np.array([900 + number], np.int32)])
        return AttemptOutcome()


@dataclass(kw_only=True)
class ByNumber:
    """Scores a turn by its number, after a while; ``fails`` says which it fails at."""

    seconds: float = 0.0
    fails: Callable[[int], bool] = lambda number: False

    labels = ("rule", "steps")

    def __post_init__(self) -> None:
        self.asked: list[tuple[int, int, float]] = []

    async def score_turn(self, task: Task, text: str, history: str, turn: int, *, context: object = None) -> Graded:
        self.asked.append((turn, len(history), asyncio.get_running_loop().time()))
        await asyncio.sleep(self.seconds)
        if self.fails(turn):
            return Graded(reward=None, failure="reward_timeout: steps: late")
        return Graded(reward=float(turn), parts={"steps": float(turn)})

    def over_turns(self, turns: Sequence[Graded]) -> list[float]:
        return [turn.reward or 0.0 for turn in turns]

    def parts_of_turns(self, turns: Sequence[Graded]) -> dict[str, float]:
        return {"steps": sum(self.over_turns(turns))}


def life(run_dir: Path, scorer: ByNumber, **settings: Any) -> tuple[Life, list[ScoredGroup]]:
    """A run with that process reward, and the groups that it trained."""
    trained: list[ScoredGroup] = []

    def change(parts: Components) -> Components:
        def advantages(groups: Sequence[ScoredGroup]) -> Sequence[float]:
            trained.extend(groups)
            return parts.advantages(groups)

        return replace(parts, env=ThreeTurns(), turn_scorer=scorer, advantages=advantages)

    run_dir.mkdir(exist_ok=True)
    plan = Plan(
        run_dir=run_dir,
        engine=lambda: FakeEngine(length=lambda _: 16, token_s=0.01),
        scorer=lambda: FakeScorer(seconds=0.1, reward=lambda _: 1.0),
        parts=change,
        **settings,
    )
    return live(plan), trained


def test_turns_are_scored_while_their_episode_goes_on_and_added_up_at_its_end(tmp_path: Path) -> None:
    scorer = ByNumber()
    done, trained = life(tmp_path, scorer, steps=2)
    assert done.ended
    for episode in (episode for group in trained for episode in group.scored):
        assert episode.reward == 1.0 + 0 + 1 + 2
        assert [turn.reward for turn in episode.turns if turn.stop_reason] == [0.0, 1.0, 2.0]
        assert episode.parts == {"steps": 3.0}
    first, *_, last = [next(asked for asked in scorer.asked if asked[0] == number) for number in range(3)]
    assert first[1] == 1  # it had read one token of the prompt
    assert last[2] - first[2] == pytest.approx(2 * 0.16)  # each as soon as it had been sampled
    assert {turn for turn, _, _ in scorer.asked} == {0, 1, 2}
    assert "scoring turns" in {span.lane for span in done.seen.all_spans}


def test_slow_process_rewards_do_not_hold_generation_up(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 6, "flow": {"max_age": 4}}
    fast, _ = life(tmp_path / "fast", ByNumber(), **settings)
    slow, _ = life(tmp_path / "slow", ByNumber(seconds=0.3), **settings)
    assert slow.seconds < fast.seconds + 2 * 0.3


def test_a_process_reward_that_fails_costs_its_own_episode_by_its_reason(tmp_path: Path) -> None:
    calls = iter(range(10_000))
    done, trained = life(tmp_path, ByNumber(fails=lambda _: next(calls) % 10 == 0), steps=3)
    assert done.ended
    assert any("reward_timeout: steps: late" in warning for warning in done.summary.warnings)
    assert done.summary.ledger.episodes.dropped["reward_timeout"] > 0
    assert all(episode.reward == 4.0 for group in trained for episode in group.scored)


def turn(ids: Sequence[int], *, parent: int | None, sampled: bool, reward: float | None = None) -> Turn:
    if not sampled:
        return Turn(author="user", tokens=Tokens.observed(np.array(ids, np.int32)), parent=parent)
    tokens = Tokens(ids_T=ids, logprobs_T=[-1.0] * len(ids), versions_T=[0] * len(ids))
    return Turn(author="policy", tokens=tokens, parent=parent, stop_reason=StopReason.STOP, reward=reward)


def episode(place: int, reward: float, *earned: float | None, seen: int = 7) -> EpisodeGraph:
    """Two turns of the policy; what is given between them is ``seen``."""
    turns = [
        turn([1], parent=None, sampled=False),
        turn([2, 3], parent=0, sampled=True, reward=earned[0]),
        turn([seen], parent=1, sampled=False),
        turn([4], parent=2, sampled=True, reward=earned[1]),
    ]
    return EpisodeGraph(key=EpisodeKey(0, place), turns=turns, status=EpisodeStatus.SCORED, reward=reward)


def test_turns_are_credited_with_what_they_earned_against_others_in_the_same_state() -> None:
    algo = AlgoConfig(advantage={"kind": "step", "gamma": 0.5, "weight": 1.0})
    group = ScoredGroup(
        number=0, episodes=(episode(0, 1.0, 0.5, None), episode(1, 0.0, None, None), episode(2, 3.0, None, 2.0, seen=8))
    )
    # returns: 0.5 + 0.5·0.5, 0.5; 0, 0; 0 + 0.5·3, 3: the last turn earned what is left of 3
    whole = [1.0 - 1.5, 0.0 - 2.0, 3.0 - 0.5]
    firsts = [0.75 - 0.75, 0.0 - 1.125, 1.5 - 0.375]
    lasts = [0.5 - 0.0, 0.0 - 0.5, 0.0]  # the third was in a state of its own
    expected = [[0, a + b, 0, a + c] for a, b, c in zip(whole, firsts, lasts, strict=True)]
    credits = credit(algo, [group])
    assert [list(each) for each in credits if not isinstance(each, float)] == [pytest.approx(row) for row in expected]
    batch = collate(0, [group], credits)
    assert batch.advantages_N[batch.mask_N].tolist() == pytest.approx(
        [value for row in expected for value in (row[1], row[1], row[3])]
    )


def test_without_process_rewards_the_last_turn_earned_everything() -> None:
    group = ScoredGroup(number=0, episodes=(episode(0, 1.0, None, None), episode(1, 0.0, None, None)))
    undiscounted = AlgoConfig(advantage={"kind": "step", "gamma": 1.0, "weight": 1.0})
    assert [list(each) for each in credit(undiscounted, [group]) if not isinstance(each, float)] == [
        [0, 2, 0, 2],
        [0, -2, 0, -2],
    ]


def test_components_reach_an_advantage_that_tells_them_apart() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}, {"a": 0.0, "b": 0.0}]
    episodes = tuple(replace(episode(n, sum(p.values()), None, None), parts=p) for n, p in enumerate(parts))
    group = ScoredGroup(number=0, episodes=episodes)
    first, second, _ = credit(AlgoConfig(advantage="gdpo"), [group])
    assert first == pytest.approx(second, rel=1e-4)  # a reward of 100 does not drown one of 1
    first, second, _ = credit(AlgoConfig(advantage="grpo"), [group])
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert first < 0 < second
