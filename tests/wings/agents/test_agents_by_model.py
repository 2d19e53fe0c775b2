"""A program chooses who answers by the name of the model."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.base.clock import RealClock
from headrace.base.types.episode import EpisodeKey
from headrace.rollout import Conversations, EnginePolicy, EpisodeLimits, EpisodeRunner
from headrace.rollout.agents import FROZEN_AGENT, Agents
from headrace.rollout.chat import Chat
from headrace.rollout.environments import SingleTurn
from headrace.wings.agents import Endpoint
from tests.wings.agents import agents
from tests.wings.agents.harness import EOS, SAMPLING, TOKENIZER, ScriptedEngine

HI: Any = [{"role": "user", "content": "hi"}]


def test_the_model_of_a_request_names_the_agent_that_answers_in_every_protocol() -> None:
    own, other = ScriptedEngine(lambda _: "mine"), ScriptedEngine(lambda _: "theirs")
    cast = Agents(known=frozenset({"player", "opponent"}), engines={"opponent": other})  # type: ignore[dict-item]
    runner = EpisodeRunner(
        engine=own,  # type: ignore[arg-type]
        env=SingleTurn(),
        sampling=SAMPLING,
        run_seed=0,
        on_tokens=lambda _: None,
        agents=cast,
    )
    policy = EnginePolicy(runner=runner, key=EpisodeKey(0, 0))
    talk = Conversations(policy, EpisodeLimits(), chat=Chat.create(TOKENIZER, (EOS,)), seed=0, note=lambda _: None)

    async def play() -> list[str]:
        said: list[str] = []
        async with (
            asyncio.timeout(30),
            Endpoint.listening(SAMPLING, clock=RealClock(), warn=lambda _: None, agents=cast.known) as endpoint,
            endpoint.session(talk) as access,
            agents.oai(access) as client,
            agents.claude(access) as claude,
        ):
            assert [model.id async for model in client.models.list()] == ["policy", "opponent", "player"]
            for model in ("player", "opponent/2", "gpt-4o"):
                chat = await client.chat.completions.create(model=model, messages=HI)
                said.append(chat.choices[0].message.content or "")
            said.append((await client.responses.create(model="opponent", input="hi")).output_text)
            message = await claude.messages.create(model="opponent", messages=HI, max_tokens=9)
            said.append(message.content[0].text)  # type: ignore[union-attr]
        return said

    assert asyncio.run(play()) == ["mine", "theirs", "mine", "theirs", "theirs"]
    answers = [turn for turn in talk.turns if turn.stop_reason is not None]
    assert [turn.author for turn in answers] == ["player", "opponent/2", "policy", "opponent", "opponent"]
    assert [turn.untrained for turn in answers] == ["", FROZEN_AGENT, "", FROZEN_AGENT, FROZEN_AGENT]
