"""Agents that earn each their own: every one is compared with its role's, and its turns alone are credited with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algo.config import AlgoConfig
from headrace.base.errors import ConfigError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, Turn, get_role
from headrace.base.types.scored import ScoredGroup
from headrace.base.types.tokens import Tokens
from headrace.base.types.versions import FROZEN
from headrace.control.credit import credit
from headrace.control.groups import have_signal
from headrace.flow.filters.base import KEEP, FilterContext
from headrace.flow.filters.rewards import ZeroVariance
from headrace.flow.layout import collate
from headrace.rollout.agents import FROZEN_AGENT

MEAN_ONLY = AlgoConfig(advantage={"kind": "grpo", "std": "none"})
REWARDS = st.floats(-3, 3, width=32)


def said(author: str, count: int, parent: int | None, *, frozen: bool = False, reward: float | None = None) -> Turn:
    tokens = Tokens(
        ids_T=np.arange(count), logprobs_T=-np.ones(count), versions_T=np.full(count, FROZEN if frozen else 3)
    )
    return Turn(
        author=author,
        tokens=tokens,
        parent=parent,
        stop_reason=StopReason.STOP,
        untrained=FROZEN_AGENT if frozen else "",
        reward=reward,
    )


def given_turn(parent: int | None = None) -> Turn:
    return Turn(author="task" if parent is None else "user", tokens=Tokens.observed([7, 8]), parent=parent)


def episode(group: int, place: int, turns: Sequence[Turn], **fields: Any) -> EpisodeGraph:
    fields = {"status": EpisodeStatus.SCORED, "reward": 0.0, **fields}
    return EpisodeGraph(key=EpisodeKey(group, place), turns=list(turns), **fields)


def game(group: int, place: int, rewards: Mapping[str, float], *, silent: Sequence[str] = ()) -> EpisodeGraph:
    """Each agent answers twice, in a conversation of its own."""
    turns: list[Turn] = []
    for agent in rewards:
        if agent not in silent:
            turns.append(given_turn())
            turns.append(said(agent, 2, len(turns) - 1))
            turns.append(given_turn(len(turns) - 1))
            turns.append(said(agent, 3, len(turns) - 1))
    return episode(group, place, turns or [given_turn()], agent_rewards=dict(rewards))


def grouped(*episodes: EpisodeGraph) -> list[ScoredGroup]:
    numbers = sorted({each.key.group for each in episodes})
    return [
        ScoredGroup(number=number, episodes=tuple(each for each in episodes if each.key.group == number))
        for number in numbers
    ]


def by_agent(episodes: Sequence[EpisodeGraph], credits: Sequence[Any]) -> list[dict[str, float]]:
    """What the turns of each agent are credited with: one number for all of them; given turns with nothing."""
    found: list[dict[str, float]] = []
    for each, of_turns in zip(episodes, credits, strict=True):
        agents: dict[str, set[float]] = {}
        for turn, advantage in zip(each.turns, of_turns, strict=True):
            if turn.stop_reason is None or turn.untrained:
                assert advantage == 0.0
            else:
                agents.setdefault(turn.author, set()).add(advantage)
        assert all(len(values) == 1 for values in agents.values())
        found.append({agent: values.pop() for agent, values in agents.items()})
    return found


def reference(episodes: Sequence[EpisodeGraph]) -> list[dict[str, float]]:
    """GRPO by hand, in float64: (R − mean) / (std + 1e-6) over all agents of a role in a group, ddof 1."""
    pools: dict[tuple[int, str], list[float]] = {}
    for each in episodes:
        for agent, reward in each.agent_rewards.items():
            pools.setdefault((each.key.group, get_role(agent)), []).append(reward)
    found: list[dict[str, float]] = []
    for each in episodes:
        row = {}
        for agent, reward in each.agent_rewards.items():
            pool = pools[each.key.group, get_role(agent)]
            mean = math.fsum(pool) / len(pool)
            spread = math.fsum((value - mean) ** 2 for value in pool)
            std = math.sqrt(spread / (len(pool) - 1)) if len(pool) > 1 else 0.0
            row[agent] = (reward - mean) / (std + 1e-6) if std > 0 else 0.0
        found.append(row)
    return found


@given(
    st.lists(
        st.lists(st.tuples(REWARDS, REWARDS, REWARDS), min_size=2, max_size=5), min_size=1, max_size=3
    )
)  # fmt: skip
def test_each_agent_is_compared_with_its_own_role_in_its_own_group(table: list[list[tuple[float, ...]]]) -> None:
    names = ("proposer", "solver/0", "solver/1")
    episodes = [
        game(group, place, dict(zip(names, rewards, strict=True)))
        for group, rows in enumerate(table)
        for place, rewards in enumerate(rows)
    ]
    credits = credit(AlgoConfig(), grouped(*episodes))
    for found, wanted in zip(by_agent(episodes, credits), reference(episodes), strict=True):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(REWARDS, st.booleans()), min_size=2, max_size=8))
def test_in_a_zero_sum_game_what_one_player_is_praised_for_the_other_is_blamed_for(
    games: list[tuple[float, bool]],
) -> None:
    """Each seat has a baseline of its own, so the better seat earns no praise; the two sum to 0 all the same. A player
    who lost before its first move counts in its seat's baseline."""
    episodes = [
        game(0, place, {"first": reward, "second": -reward}, silent=["second"] if silent else [])
        for place, (reward, silent) in enumerate(games)
    ]
    found = by_agent(episodes, credit(MEAN_ONLY, grouped(*episodes)))
    mean = math.fsum(reward for reward, _ in games) / len(games)
    for row, (reward, silent) in zip(found, games, strict=True):
        assert row["first"] == pytest.approx(reward - mean, abs=1e-9)
        assert ("second" in row) == (not silent)
        assert sum(row.values()) == pytest.approx(0.0 if not silent else reward - mean, abs=1e-9)


def test_without_rewards_by_agent_an_episode_is_credited_as_a_whole() -> None:
    plain = [episode(0, place, [given_turn(), said("writer", 2, 0), said("critic", 1, 0)]) for place in range(3)]
    for each, reward in zip(plain, (0.0, 1.0, 5.0), strict=True):
        each.reward = reward
    assert credit(MEAN_ONLY, grouped(*plain)) == pytest.approx([-2.0, -1.0, 3.0])


def test_an_episode_that_gives_one_reward_gives_it_to_all_of_its_agents() -> None:
    told = game(0, 0, {"writer": 1.0, "critic": 4.0})
    whole = replace(game(0, 1, {"writer": 0.0, "critic": 0.0}), agent_rewards={}, reward=3.0)
    found = by_agent([told, whole], credit(MEAN_ONLY, grouped(told, whole)))
    assert found == [
        pytest.approx({"writer": -1.0, "critic": 0.5}),
        pytest.approx({"writer": 1.0, "critic": -0.5}),
    ]


def test_frozen_agents_are_in_no_baseline_and_their_tokens_carry_no_loss() -> None:
    episodes = [
        episode(
            0,
            place,
            [given_turn(), said("player", 2, 0), said("opponent", 3, 1, frozen=True), said("player", 1, 2)],
            agent_rewards={"player": reward, "opponent": 100.0 * place},
        )
        for place, reward in enumerate((1.0, -1.0))
    ]
    credits = credit(MEAN_ONLY, grouped(*episodes))
    assert credits == [[0.0, 1.0, 0.0, 1.0], [0.0, -1.0, 0.0, -1.0]]
    batch = collate(5, grouped(*episodes), credits)
    assert batch.mask_N.tolist() == [False, False, True, True, False, False, False, True] * 2
    assert batch.advantages_N[batch.mask_N].tolist() == [1.0] * 3 + [-1.0] * 3
    assert set(batch.ages()) == {2}  # weights that are not the run's do not age
    assert [each.versions() for each in episodes] == [(3, 3)] * 2


def test_turns_are_credited_by_step_within_their_agent() -> None:
    """What single answers earned is compared among answers of one role in one state."""
    algo = AlgoConfig(advantage={"kind": "step", "gamma": 0.5, "weight": 1.0})

    def played(place: int, own: tuple[float, float], judge: float) -> EpisodeGraph:
        turns = [
            given_turn(), said("player", 1, 0, reward=own[0]), given_turn(1), said("player", 1, 2),
            given_turn(), said("judge", 1, 4),
        ]  # fmt: skip
        return episode(0, place, turns, agent_rewards={"player": sum(own), "judge": judge})

    episodes = [played(0, (1.0, 2.0), 10.0), played(1, (0.0, 1.0), 30.0)]
    (first, second) = credit(algo, grouped(*episodes))
    # episode credit ±2; returns of the first answers 1 + 0.5·2 = 2 and 0.5, of the second ones 2 and 1. The state is
    # what was given before an answer, the same two tokens everywhere: within a role each is compared with three others
    returns = [2.0, 2.0, 0.5, 1.0]
    steps = [value - (sum(returns) - value) / 3 for value in returns]
    assert first[1::2] == pytest.approx([2.0 + steps[0], 2.0 + steps[1], -20.0 - 20.0])
    assert second[1::2] == pytest.approx([-2.0 + steps[2], -2.0 + steps[3], 20.0 + 20.0])


def test_a_critic_that_credits_samples_is_refused_where_agents_are_told_apart() -> None:
    algo = AlgoConfig(advantage="gae", loss="grpo")
    with pytest.raises(ConfigError, match=r"algo\.advantage='gae'.*agent_rewards"):
        credit(algo, grouped(game(0, 0, {"a": 1.0}), game(0, 1, {"a": 0.0})))


def test_rewards_that_differ_for_one_agent_are_something_to_prefer() -> None:
    equal = grouped(game(0, 0, {"a": 1.0, "b": -1.0}), game(0, 1, {"a": 1.0, "b": -1.0}))
    apart = grouped(game(0, 0, {"a": 1.0, "b": -1.0}), game(0, 1, {"a": -1.0, "b": 1.0}))
    assert not have_signal(equal)
    assert have_signal(apart)
    context = FilterContext(decode=str, seed=0)
    assert ZeroVariance()(equal[0], context).reason == "zero_variance"
    assert ZeroVariance()(apart[0], context) == KEEP
