"""Several agents in one episode: frozen ones have engines of their own, and every answer knows whose it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.clock import run_virtual
from headrace.base.errors import EpisodeError
from headrace.base.types.batch import Batch
from headrace.base.types.chat import ChatOptions, Message
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, StopReason, TokenChunk
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import ScoredGroup, num_untrained, paths
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn
from headrace.base.types.versions import FROZEN
from headrace.engine import PLAIN, RequestOptions
from headrace.rollout import EpisodeRunner
from headrace.rollout.agents import FROZEN_AGENT, Agents
from headrace.rollout.conversations import TurnRequest
from headrace.rollout.environments import AttemptOutcome, OpenEpisode, SingleTurn
from headrace.rollout.history import prompt_digest
from headrace.rollout.runner import EnginePolicy
from tests.rollout.models import conversations
from tests.rollout.test_conversations import MOVES, moved
from tests.rollout.test_episode_runner import Scripted, chunk

TASK = Task(row_index=0, row={}, prompt="?", prompt_ids_T=np.array([5, 6], np.int32))


class Played:
    begins_with_prompt = False

    def __init__(self, play: Callable[[OpenEpisode], Awaitable[AttemptOutcome]]) -> None:
        self._play = play

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        return await self._play(episode)


class Watched(Scripted):
    """Remembers what was asked of it beyond the prompt."""

    def __init__(self, *chunks: Any) -> None:
        super().__init__(*chunks)
        self.told: list[RequestOptions] = []

    async def generate(self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN) -> Any:
        self.told.append(options)
        async for each in super().generate(prompt_ids_T, sampling, options):
            yield each


def run(
    play: Callable[[OpenEpisode], Awaitable[AttemptOutcome]], *, engine: Scripted, agents: Agents, **more: Any
) -> EpisodeGraph:
    runner = EpisodeRunner(
        engine=engine, env=Played(play), sampling=Sampling(max_new_tokens=8, record_routing=True), run_seed=3,
        on_tokens=lambda _: None, agents=agents, **more,
    )  # fmt: skip
    return run_virtual(runner.run(EpisodeKey(2, 1), TASK))


def sample(episode: OpenEpisode, *ids: int, agent: str = "policy") -> Awaitable[Any]:
    return episode.sample(np.array(ids, np.int32), ChatOptions(agent=agent))


def test_a_frozen_agent_answers_from_its_own_engine_and_its_tokens_carry_no_loss() -> None:
    own, other = Scripted(chunk(1, 2, version=4, stop_reason=StopReason.STOP)), Watched(
        chunk(3, version=0), chunk(4, version=0, stop_reason=StopReason.STOP)
    )  # fmt: skip
    parts: list[Any] = []
    turns: list[str] = []

    async def play(episode: OpenEpisode) -> AttemptOutcome:
        mine = await sample(episode, 5, agent="player")
        answered = await sample(episode, 5, *mine.token_ids, 9, agent="opponent/1")
        await sample(episode, 5, *mine.token_ids, 9, *answered.token_ids, agent="player")
        return AttemptOutcome(reward=1.0)

    episode = run(
        play,
        engine=own,
        agents=Agents(known=frozenset({"player", "opponent"}), engines={"opponent": other}),
        on_part=parts.append,
        on_turn=lambda key, prompt, turn: turns.append(turn.author),
    )
    assert episode.status is EpisodeStatus.FINISHED
    assert [turn.author for turn in episode.turns] == ["task", "player", "user", "opponent/1", "player"]
    frozen = episode.turns[3]
    assert (frozen.tokens.ids_T.tolist(), frozen.tokens.versions_T.tolist()) == ([3, 4], [FROZEN, FROZEN])
    assert frozen.untrained == FROZEN_AGENT
    assert frozen.tokens.logprobs_T.tolist() == [-0.5, -0.5]
    assert episode.versions() == (4, 4)
    (trained,) = paths(episode, 1.0)
    assert trained.tokens.ids_T[trained.mask_T].tolist() == [1, 2, 1, 2]
    episode.status = EpisodeStatus.SCORED
    assert num_untrained([ScoredGroup(number=2, episodes=(episode,))]) == {FROZEN_AGENT: 2}
    assert turns == ["player", "player"]  # no process reward is asked of what the opponent said
    assert sum(len(part.tokens) for part in parts) == 6  # a crash loses nothing of it either
    ((_, asked),) = other.asked
    assert (own.asked[0][1].record_routing, asked.record_routing) == (True, False)


def test_an_agent_that_is_only_named_gives_the_same_samples() -> None:
    def played(agent: str, agents: Agents) -> tuple[EpisodeGraph, Scripted]:
        engine = Scripted(chunk(1, 2, version=4, stop_reason=StopReason.STOP))

        async def play(episode: OpenEpisode) -> AttemptOutcome:
            await sample(episode, 5, agent=agent)
            await sample(episode, 5, 1, 2, 9, agent=agent)
            return AttemptOutcome(reward=1.0)

        return run(play, engine=engine, agents=agents), engine

    plain, engine = played("policy", Agents())
    named, other = played("writer", Agents(known=frozenset({"writer"})))
    assert [(prompt, asked.seed) for prompt, asked in engine.asked] == [
        (prompt, asked.seed) for prompt, asked in other.asked
    ]
    for one, two in zip(paths(plain, 1.0), paths(named, 1.0), strict=True):
        assert one.tokens.ids_T.tolist() == two.tokens.ids_T.tolist()
        assert one.mask_T.tolist() == two.mask_T.tolist()


def test_a_name_that_no_table_knows_is_refused_with_the_nearest() -> None:
    async def play(episode: OpenEpisode) -> AttemptOutcome:
        await sample(episode, 5, agent="oponent")
        return AttemptOutcome(reward=1.0)

    engine = Scripted(chunk(1, version=0, stop_reason=StopReason.STOP))
    episode = run(play, engine=engine, agents=Agents(known=frozenset({"player", "opponent"})))
    assert episode.status is EpisodeStatus.FAILED
    assert episode.cause.startswith("env_error: an answer of agent 'oponent'")
    assert not engine.asked
    with pytest.raises(EpisodeError, match=r"agent 'oponent'") as refused:
        Agents(known=frozenset({"opponent"})).frozen("oponent")
    assert "did you mean 'opponent'?" in refused.value.remedy
    assert run(play, engine=engine, agents=Agents()).status is EpisodeStatus.FINISHED  # without tables any name will do


def test_after_a_crash_each_agent_gets_its_own_answer_to_the_same_question_again() -> None:
    parts: dict[int, Any] = {}

    async def play(episode: OpenEpisode) -> AttemptOutcome:
        await sample(episode, 5, agent="player")
        await sample(episode, 5, agent="opponent")
        return AttemptOutcome(reward=1.0)

    async def other_way(episode: OpenEpisode) -> AttemptOutcome:
        await sample(episode, 5, agent="opponent")
        await sample(episode, 5, agent="player")
        return AttemptOutcome(reward=1.0)

    def engines() -> tuple[Scripted, Scripted]:
        return Scripted(chunk(1, version=4, stop_reason=StopReason.STOP)), Scripted(
            chunk(3, version=0, stop_reason=StopReason.STOP)
        )

    own, other = engines()
    agents = Agents(engines={"opponent": other})
    run(play, engine=own, agents=agents, on_part=lambda part: parts.setdefault(part.turn, part))
    own, other = engines()
    runner = EpisodeRunner(
        engine=own, env=Played(other_way), sampling=Sampling(max_new_tokens=8), run_seed=3,
        on_tokens=lambda _: None, agents=Agents(engines={"opponent": other}),
    )  # fmt: skip
    episode = run_virtual(runner.run(EpisodeKey(2, 1), TASK, partial_turns=list(parts.values())))
    assert not own.asked
    assert not other.asked
    said = [(turn.author, turn.tokens.ids_T.tolist()) for turn in episode.turns if turn.stop_reason is not None]
    assert said == [("opponent", [3]), ("player", [1])]


def test_what_is_unset_of_an_episodes_reward_is_the_mean_over_agents_that_are_trained() -> None:
    def earned(outcome: AttemptOutcome) -> EpisodeGraph:
        async def play(episode: OpenEpisode) -> AttemptOutcome:
            await asyncio.gather(*(sample(episode, 5, agent=agent) for agent in ("a", "b", "opponent")))
            return outcome

        own, other = (
            Scripted(chunk(1, version=4, stop_reason=StopReason.STOP)),
            Scripted(chunk(3, version=0, stop_reason=StopReason.STOP)),
        )
        return run(play, engine=own, agents=Agents(engines={"opponent": other}))

    rewards = {"a": 1.0, "b": 2.0, "opponent": 9.0}
    assert earned(AttemptOutcome(agent_rewards=rewards)).reward == 1.5
    assert earned(AttemptOutcome(agent_rewards={**rewards, "silent": 6.0})).reward == 3.0
    assert earned(AttemptOutcome(agent_rewards=rewards, reward=7.0)).reward == 7.0
    assert earned(AttemptOutcome(agent_rewards=rewards, trained=())).reward == 4.0
    lacking = earned(AttemptOutcome(agent_rewards={"a": 1.0}))
    assert (lacking.status, lacking.cause) == (
        EpisodeStatus.FAILED,
        "reward_none: agent_rewards leaves out 'b', whose answers carry loss",
    )


def test_of_two_agents_that_said_the_same_each_goes_on_behind_its_own_answer() -> None:
    talk = conversations(lambda text: "yes")
    asked = Message(role="user", content="well")

    def ask(*messages: Message, agent: str) -> Any:
        return asyncio.run(talk.reply(messages, (), ChatOptions(agent=agent)))

    first, second = ask(asked, agent="a"), ask(asked, agent="b")
    for agent, own in (("b", second), ("a", first), ("b", second)):
        reply = ask(asked, own.message, Message(role="user", content=f"and then, {agent}"), agent=agent)
        episode = EpisodeGraph(key=talk.key, turns=talk.turns)
        authors = {talk.turns[turn].author for turn in episode.path(reply.turn)} - {"task", "user"}
        assert authors == {agent}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(MOVES, st.integers(0, 9), st.integers(0, 9), st.sampled_from(["lead", "sub/0", "sub/1"])),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_in_any_graph_of_agents_every_token_is_trained_once_with_the_credit_of_its_author(
    moves: list[tuple[tuple[str, str], int, int, str]],
) -> None:
    """Sub-agents, parallel branches, edited and compacted histories, and those that are taken over from another."""
    talk = conversations(lambda text: f"w{len(text) % 3}")
    held: list[list[Message]] = []
    for (move, text), who, place, agent in moves:
        history = held[who % len(held)] if held else []
        sent = moved(history, move, text, place) if history else [Message(role="user", content=text)]
        reply = asyncio.run(talk.reply(sent, (), ChatOptions(agent=agent)))
        held.append([*sent, reply.message])
    credits = {"lead": 1.0, "sub/0": 2.0, "sub/1": 3.0}
    episode = EpisodeGraph(key=talk.key, turns=talk.turns)
    of_turns = [credits.get(turn.author, 0.0) for turn in talk.turns]
    trained: dict[float, float] = {}
    for each in paths(episode, of_turns):
        for logprob, advantage in zip(each.tokens.logprobs_T[each.mask_T], each.advantage[each.mask_T], strict=True):
            trained[float(logprob)] = trained.get(float(logprob), 0.0) + float(advantage)
    expected: dict[float, float] = {}
    for turn in talk.turns:
        if turn.stop_reason is not None:  # the speaker marks every turn by its logprob
            mark = float(turn.tokens.logprobs_T[0])
            expected[mark] = credits[turn.author] * len(turn.tokens)
    assert trained == expected


def test_an_agent_with_an_adapter_is_asked_of_the_policys_engine_by_name_and_trains_it() -> None:
    engine = Watched(chunk(1, 2, version=4, stop_reason=StopReason.STOP))

    async def play(episode: OpenEpisode) -> AttemptOutcome:
        await sample(episode, 5, agent="solver/1")
        await sample(episode, 5, 1, 2, 9, agent="editor")
        await sample(episode, 7)
        return AttemptOutcome(reward=1.0)

    agents = Agents(known=frozenset({"solver", "editor"}), adapters=("solver",))
    episode = run(play, engine=engine, agents=agents)
    assert episode.status is EpisodeStatus.FINISHED
    assert [options.agent for options in engine.told] == ["solver", "", ""]
    batch = Batch.collate(4, paths(episode, 1.0), agents.adapters)
    assert batch.agents_N is not None
    owners = [batch.agents[place] for place in batch.agents_N[batch.mask_N].tolist()]
    assert owners == ["solver", "solver", "", "", "", ""]  # the editor's words, and the policy's, are the policy's
    assert Batch.collate(4, paths(episode, 1.0)).agents_N is None


def test_what_one_agent_had_begun_after_a_prompt_another_does_not_go_on_with() -> None:
    def asking(agent: str, partial_turns: dict[int, TokenChunk]) -> tuple[Watched, EnginePolicy]:
        engine = Watched(chunk(1, version=4), chunk(2, version=4, stop_reason=StopReason.STOP))
        runner = EpisodeRunner(
            engine=engine, env=SingleTurn(), sampling=Sampling(max_new_tokens=8), run_seed=3,
            on_tokens=lambda _: None, agents=Agents(adapters=("proposer", "solver")),
        )  # fmt: skip
        policy = EnginePolicy(runner=runner, key=EpisodeKey(2, 1), partial_turns=partial_turns)
        prompt = np.array([5], np.int32)
        wanted = TurnRequest(
            prompt_ids_T=prompt, digest=prompt_digest(prompt), parent=0, author=agent, sampling=policy.sampling
        )
        run_virtual(policy.sample(wanted))
        return engine, policy

    _, first = asking("solver", {})
    (part,) = first._sampled.values()
    partial_turns = {0: msgspec.structs.replace(part, tokens=part.tokens[:1], stop_reason=None)}
    same, _ = asking("solver", partial_turns)
    other, _ = asking("proposer", partial_turns)
    assert same.told[0].answer_ids_T is not None
    assert other.told[0].answer_ids_T is None
