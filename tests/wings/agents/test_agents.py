"""The real clients drive an agent with a tool, over several turns: what it trains is what was sampled, and as without
any protocol."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.base.types.episode import EpisodeStatus, StopReason
from headrace.rollout.environments.program import Program
from headrace.wings.agents import Access, SessionLimits
from tests.wings.agents import agents
from tests.wings.agents.harness import ADD, TOKENIZER, add_directly, sampled, samples, world

AGENTS = {
    f"{agent.__name__}-{'stream' if stream else 'whole'}": partial(agent, stream=stream)
    for agent in (agents.chat, agents.responses, agents.messages)
    for stream in (False, True)
} | {"responses-chained": partial(agents.responses, stream=False, chained=True)}


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_trains_what_it_would_train_without_a_protocol(name: str) -> None:
    async def run() -> None:
        async with world() as here:
            told: list[Any] = []
            episode = await here.play(partial(AGENTS[name], told=told))
            assert episode.status is EpisodeStatus.FINISHED, episode.cause
            assert sampled(episode) == here.engine.sampled  # every sampled token, once
            authors = [turn.author for turn in episode.turns]
            assert authors == ["task", "policy", "tool", "policy", "user", "policy", "tool", "policy"]
            assert len(episode.leaves()) == 1
            expected = await here.direct(add_directly)
            assert samples(episode) == samples(expected)
            assert len(told) == 4
            assert not here.warnings

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_tell_text_calls_tokens_and_ends(stream: bool) -> None:
    async def run() -> None:
        async with world() as here:
            told: list[Any] = []
            episode = await here.play(partial(agents.chat, stream=stream, told=told))
        first, second = told[:2]
        (call,) = first.message.tool_calls
        assert first.message.content == "Let me see."
        assert (call.id, call.function.name) == ("call_1_0", "add")
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert (second.message.content, second.message.tool_calls) == ("It is 5.", None)
        assert [choice.finish_reason for choice in told] == ["tool_calls", "stop"] * 2
        if not stream:
            assert [token for choice in told for token in choice.token_ids] == sampled(episode)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tell_text_calls_and_numbers_of_tokens(stream: bool) -> None:
    async def run() -> None:
        async with world() as here:
            told: list[Any] = []
            episode = await here.play(partial(agents.responses, stream=stream, told=told))
        assert [response.status for response in told] == ["completed"] * 4
        assert told[1].output_text == "It is 5."
        said, call = told[0].output
        assert (said.content[0].text, call.call_id, call.name) == ("Let me see.", "call_1_0", "add")
        assert sum(response.usage.output_tokens for response in told) == len(sampled(episode))
        assert [response.usage.input_tokens for response in told] == [
            sum(len(turn.tokens) for turn in episode.turns[:place]) for place in (1, 3, 5, 7)
        ]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_text_calls_and_numbers_of_tokens(stream: bool) -> None:
    async def run() -> None:
        async with world() as here:
            told: list[Any] = []
            episode = await here.play(partial(agents.messages, stream=stream, told=told))
        assert [message.stop_reason for message in told] == ["tool_use", "end_turn"] * 2
        said, call = told[0].content
        assert (said.text, call.id, call.name, call.input) == ("Let me see.", "call_1_0", "add", {"a": 2, "b": 3})
        assert told[1].content[0].text == "It is 5."
        assert sum(message.usage.output_tokens for message in told) == len(sampled(episode))
        assert told[0].usage.input_tokens == len(episode.turns[0].tokens)

    asyncio.run(run())


def test_a_history_that_was_edited_branches_and_the_shared_turns_are_trained_once() -> None:
    async def program(access: Access) -> None:
        async with agents.oai(access) as client:
            said: list[Any] = [{"role": "user", "content": "one"}]
            for content in ("two", "three"):
                completion = await client.chat.completions.create(model="m", messages=said)
                said += [completion.choices[0].message, {"role": "user", "content": content}]
            await client.chat.completions.create(model="m", messages=said)
            said[3] = {"role": "assistant", "content": "what the policy never said"}
            await client.chat.completions.create(model="m", messages=said)
            del said[0:2]  # compacted: nothing of it is held
            await client.chat.completions.create(model="m", messages=said)

    async def run() -> None:
        async with world(lambda text: f"answer after {len(text)}") as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert sorted(episode.path(leaf) for leaf in episode.leaves()) == [
            [0, 1, 2, 3, 4, 5], [0, 1, 6, 7], [8, 9],
        ]  # fmt: skip
        assert sampled(episode) == here.engine.sampled
        trained = [token for ids, mask, *_ in samples(episode) for token, on in zip(ids, mask, strict=True) if on]
        assert sorted(trained) == sorted(here.engine.sampled)  # the shared answers once

    asyncio.run(run())


def test_several_choices_hang_beside_each_other() -> None:
    async def program(access: Access) -> None:
        async with agents.oai(access) as client:
            completion = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], n=3, logprobs=True
            )
            assert [choice.index for choice in completion.choices] == [0, 1, 2]
            assert completion.usage.completion_tokens == 3 * 6
            for choice in completion.choices:
                tokens = choice.logprobs.content
                assert "".join(token.token for token in tokens) == "hello<eos>"
                assert [token.logprob for token in tokens] == pytest.approx([-0.01 * place for place in range(1, 7)])
            events = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], n=2, stream=True,
                stream_options={"include_usage": True}, logprobs=True,
            )  # fmt: skip
            chunks = [chunk async for chunk in events]
            assert chunks[-1].usage.completion_tokens == 2 * 6
            text = {0: "", 1: ""}
            for choice in (choice for chunk in chunks for choice in chunk.choices):
                text[choice.index] += choice.delta.content or ""
            assert text == {0: "hello", 1: "hello"}

    async def run() -> None:
        async with world(lambda _: "hello") as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert [turn.parent for turn in episode.turns] == [None, 0, 0, 0, 0, 0]

    asyncio.run(run())


def test_reasoning_is_told_to_those_who_ask_and_may_be_left_out_of_the_history() -> None:
    said: list[Any] = [{"role": "user", "content": "why"}]
    again: Any = {"role": "user", "content": "continue"}

    async def by_chat(access: Access) -> None:
        async with agents.oai(access) as client:
            message: Any = (await client.chat.completions.create(model="m", messages=said)).choices[0].message
            assert (message.reasoning_content, message.content) == ("let me think", "because")
            for held in (message, {"role": "assistant", "content": "because"}):
                await client.chat.completions.create(model="m", messages=[*said, held, again])

    async def by_messages(access: Access) -> None:
        async with agents.claude(access) as client:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 99}
            plain = await client.messages.create(messages=said, **asked)
            assert [block.type for block in plain.content] == ["text"]
            held = {"role": "assistant", "content": plain.content}
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            thought = await client.messages.create(messages=[*said, held, again], thinking=thinking, **asked)
            assert [block.type for block in thought.content] == ["thinking", "text"]
            async with client.messages.stream(messages=[*said, held, again], thinking=thinking, **asked) as events:
                streamed = await events.get_final_message()
            assert [block.type for block in streamed.content] == ["thinking", "text"]
            assert streamed.content[0].thinking == "let me think"  # type: ignore[union-attr]

    async def by_responses(access: Access) -> None:
        async with agents.oai(access) as client:
            response = await client.responses.create(model="m", input=said)
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output[0].content[0].text == "let me think"  # type: ignore[union-attr,index]
            for held in (response.output, response.output[1:]):
                async with client.responses.stream(model="m", input=[*said, *held, again]) as events:
                    assert (await events.get_final_response()).output_text == "because"

    async def run() -> None:
        async with world(lambda _: "<think>let me think</think>because") as here:
            for program in (by_chat, by_messages, by_responses):
                episode = await here.play(program)
                assert episode.status is EpisodeStatus.FINISHED, episode.cause
                assert [turn.parent for turn in episode.turns] == [None, 0, 1, 2, 2]  # both continue from turn 1

    asyncio.run(run())


def test_an_answer_ends_at_a_stop_string_or_at_its_longest() -> None:
    async def program(access: Access) -> None:
        said: Any = [{"role": "user", "content": "count"}]
        async with agents.oai(access) as client, agents.claude(access) as other:
            chat = await client.chat.completions.create(model="m", messages=said, stop=[" 3"])
            assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("stop", "1 2")
            message = await other.messages.create(model="m", messages=said, stop_sequences=[" 3"], max_tokens=99)
            assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (
                "stop_sequence",
                " 3",
                "1 2",
            )  # type: ignore[union-attr]
            chat = await client.chat.completions.create(model="m", messages=said, max_completion_tokens=3)
            assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("length", "1 2")
            message = await other.messages.create(model="m", messages=said, max_tokens=3)
            assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
            response = await client.responses.create(model="m", input=said, max_output_tokens=3)
            assert (response.status, response.output_text) == ("incomplete", "1 2")
            async with client.responses.stream(model="m", input=said, max_output_tokens=3) as events:
                kinds = [event.type async for event in events]
            assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")

    async def run() -> None:
        async with world(lambda _: "1 2 3 4") as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert [turn.stop_reason for turn in episode.turns[1:]] == [StopReason.STOP] * 2 + [StopReason.LENGTH] * 4

    asyncio.run(run())


def test_streams_say_that_they_are_alive_while_nothing_has_come() -> None:
    async def program(access: Access) -> None:
        said: Any = [{"role": "user", "content": "hi"}]
        async with agents.oai(access) as client, agents.claude(access) as other:
            chunks = [
                chunk async for chunk in await client.chat.completions.create(model="m", messages=said, stream=True)
            ]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "x" * 300
            async with other.messages.stream(model="m", messages=said, max_tokens=999) as events:
                assert await events.get_final_text() == "x" * 300
            async with client.responses.stream(model="m", input=said) as replies:
                assert (await replies.get_final_response()).output_text == "x" * 300

    async def run() -> None:
        async with world(lambda _: "x" * 300, limits=SessionLimits(ping_s=1e-6)) as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    asyncio.run(run())


def test_the_tokens_of_a_conversation_are_counted_without_an_answer() -> None:
    async def program(access: Access) -> None:
        asked: dict[str, Any] = {
            "model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "1+1"}],
            "tools": [{"name": ADD.name, "input_schema": dict(ADD.parameters)}],
        }  # fmt: skip
        async with agents.claude(access) as client:
            counted = await client.messages.count_tokens(**asked)
            message = await client.messages.create(max_tokens=9, **asked)
        assert counted.input_tokens == message.usage.input_tokens > 0

    async def run() -> None:
        async with world() as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert len(episode.turns) == 2

    asyncio.run(run())


def test_what_a_program_wishes_and_does_not_get_is_told_once() -> None:
    async def program(access: Access) -> None:
        said: Any = [{"role": "user", "content": "hi"}]
        async with agents.oai(access) as client, agents.claude(access) as other:
            for _ in range(2):
                await client.chat.completions.create(
                    model="m", messages=said, temperature=0, top_p=1.0, reasoning_effort="high"
                )
                await client.responses.create(model="m", input="hi", reasoning={"effort": "low"}, temperature=0.5)
                await other.messages.create(
                    model="m", messages=said, max_tokens=9, extra_body={"top_k": 0}, output_config={"effort": "max"}
                )

    async def run() -> None:
        async with world() as here:
            first, second = await here.play(program), await here.play(program)
        assert first.status is second.status is EpisodeStatus.FINISHED, first.cause
        assert [warning.partition(";")[0] for warning in here.warnings] == [
            "a program asks for temperature=0",
            "a program asks for reasoning_effort='high'",
            "a program asks for reasoning.effort='low'",
            "a program asks for output_config.effort='max'",
        ]
        assert "the policy samples with temperature=1, as everywhere in the run" in here.warnings[0]
        assert not any(turn.untrained for turn in first.turns)

    asyncio.run(run())


def test_the_program_of_the_examples_earns_what_it_solves() -> None:
    def answer(text: str) -> str:
        said = text.rpartition("[assistant]")[0].rpartition("[")[2]
        if said.startswith("tool multiply]"):
            return f"That makes {said.removeprefix('tool multiply]').removesuffix('<eos>')}."
        return '<tool_call>{"name": "multiply", "arguments": {"a": 17, "b": 23}}</tool_call>'

    async def program(access: Access) -> None:
        agent = Program(["python", str(Path(__file__).parents[3] / "examples" / "agent.py")])
        row = {"question": "What is 17 * 23?", "answer": "391"}
        rewards.append(await agent.run(row, access.variables))

    async def run() -> None:
        async with world(answer) as here:
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert [turn.author for turn in episode.turns] == ["task", "policy", "tool", "policy"]

    rewards: list[Any] = []
    asyncio.run(run())
    assert rewards == [{"reward": 1.0}]


def test_two_hundred_sessions_at_once_each_hear_their_own_policy() -> None:
    def answer(text: str) -> str:
        return f"{text.partition('[user]')[2].partition('<eos>')[0]}!"

    async def program(number: int, access: Access) -> None:
        said: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        for _ in range(3):
            if number % 2:
                message = await clients.claude(access).messages.create(model="m", messages=said, max_tokens=99)
                told, text = {"role": "assistant", "content": message.content}, message.content[0].text  # type: ignore[union-attr]
            else:
                chat = await clients.oai(access).chat.completions.create(model="m", messages=said)
                told, text = chat.choices[0].message, chat.choices[0].message.content
            assert text == f"I am {number}!"
            said += [told, {"role": "user", "content": "more"}]

    async def run() -> None:
        nonlocal clients
        clients = agents.Clients()
        async with world(answer) as here:
            episodes = await asyncio.gather(*(here.play(partial(program, number)) for number in range(200)))
        await clients.close()
        for number, episode in enumerate(episodes):
            assert episode.status is EpisodeStatus.FINISHED, episode.cause
            assert TOKENIZER.decode(sampled(episode)) == f"I am {number}!<eos>" * 3
        assert sum(len(sampled(episode)) for episode in episodes) == len(here.engine.sampled)

    clients: Any = None
    asyncio.run(run())
