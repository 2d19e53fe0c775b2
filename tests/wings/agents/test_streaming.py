"""Streams really stream: text is told while the answer is sampled, and what is told is the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from headrace.base.errors import SequenceFailed
from headrace.base.types.episode import EpisodeStatus
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.wings.agents import Access
from tests.wings.agents import agents
from tests.wings.agents.harness import ADD, TOKENIZER, ScriptedEngine, calling, sampled, world

SAID: Any = [{"role": "user", "content": "count"}]
NUMBERS = " ".join(map(str, range(40)))


class Stepwise(ScriptedEngine):
    """Samples a chunk when it is let to."""

    def __init__(self, answer: Any) -> None:
        super().__init__(answer)
        self.steps = asyncio.Semaphore(0)
        self.breaks_after: int | None = None

    def let(self, chunks: int) -> None:
        for _ in range(chunks):
            self.steps.release()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        number = 0
        async for chunk in super().generate(prompt_ids_T, sampling, options):
            await self.steps.acquire()
            if number == self.breaks_after:
                raise SequenceFailed("its logits are not finite", remedy="ask again")
            number += 1
            yield chunk


async def chat(access: Access, **asked: Any) -> AsyncIterator[Any]:
    """The text of a stream as it comes, and at last the whole message."""
    async with (
        agents.oai(access) as client,
        client.chat.completions.stream(model="m", messages=SAID, **asked) as events,
    ):
        async for event in events:
            if event.type == "content.delta":
                yield event.delta
        yield (await events.get_final_completion()).choices[0].message.content


async def responses(access: Access, **asked: Any) -> AsyncIterator[Any]:
    async with agents.oai(access) as client, client.responses.stream(model="m", input=SAID, **asked) as events:
        async for event in events:
            if event.type == "response.output_text.delta":
                yield event.delta
        yield (await events.get_final_response()).output_text


async def messages(access: Access, **asked: Any) -> AsyncIterator[Any]:
    async with (
        agents.claude(access) as client,
        client.messages.stream(model="m", messages=SAID, max_tokens=999, **asked) as events,
    ):
        async for event in events:
            if event.type == "text":
                yield event.text
        yield (await events.get_final_message()).content[0].text  # type: ignore[union-attr]


STREAMS = {each.__name__: each for each in (chat, responses, messages)}


@pytest.mark.parametrize("name", STREAMS)
def test_text_arrives_before_the_last_token_is_sampled_and_adds_up_to_the_whole(name: str) -> None:
    async def program(access: Access) -> None:
        stream = STREAMS[name](access)
        engine.let(1)
        told.append(await anext(stream))
        assert len(engine.sampled) <= 16 < len(NUMBERS)
        engine.let(3)
        while len("".join(told)) < 32:
            told.append(await anext(stream))
        assert engine.num_running == 1
        engine.let(99)
        told.extend([text async for text in stream])

    async def run() -> None:
        nonlocal engine
        async with world(lambda _: NUMBERS) as here:
            here.engine = engine = Stepwise(lambda _: NUMBERS)
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        assert sampled(episode) == engine.sampled

    engine: Any = None
    told: list[str] = []
    asyncio.run(run())
    *pieces, whole = told
    assert "".join(pieces) == whole == NUMBERS
    assert len(pieces) >= 3


@pytest.mark.parametrize("name", STREAMS)
def test_a_client_that_leaves_a_stream_ends_its_sampling_and_the_tokens_are_kept_without_loss(name: str) -> None:
    async def program(access: Access) -> None:
        stream = STREAMS[name](access)
        engine.let(2)
        await anext(stream)
        await stream.aclose()
        await engine.reach(0)

    async def run() -> None:
        nonlocal engine
        async with world(lambda _: NUMBERS) as here:
            here.engine = engine = Stepwise(lambda _: NUMBERS)
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause
        (cut,) = (turn for turn in episode.turns if turn.parent is not None)
        assert (cut.stop_reason, cut.untrained) == (None, "cut_off")
        assert 0 < len(cut.tokens) < len(NUMBERS)
        assert cut.tokens.ids_T.tolist() == engine.sampled[: len(cut.tokens)]

    engine: Any = None
    asyncio.run(run())


def test_a_call_is_never_told_as_text() -> None:
    function = {"name": ADD.name, "description": ADD.description, "parameters": dict(ADD.parameters)}
    said: Any = [{"role": "user", "content": "2+3"}]

    async def by_chat(access: Access) -> None:
        async with agents.oai(access) as client:
            chunks = await client.chat.completions.create(
                model="m", messages=said, stream=True, tools=[{"type": "function", "function": function}]
            )
            deltas = [chunk.choices[0].delta async for chunk in chunks]
        assert [delta.content for delta in deltas if delta.content] == ["Let me s", "ee."]
        (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
        assert call.function.name == "add"

    async def by_responses(access: Access) -> None:
        async with agents.oai(access) as client:
            events = await client.responses.create(
                model="m", input=said, stream=True, tools=[{"type": "function", "strict": True, **function}]
            )
            kinds = [(event.type, getattr(event, "delta", "")) async for event in events]
        texts = [delta for kind, delta in kinds if kind == "response.output_text.delta"]
        assert texts == ["Let me s", "ee."]
        assert sum(kind == "response.function_call_arguments.done" for kind, _ in kinds) == 1

    async def by_messages(access: Access) -> None:
        tool: Any = {"name": ADD.name, "description": ADD.description, "input_schema": dict(ADD.parameters)}
        async with agents.claude(access) as client:
            events = await client.messages.create(model="m", messages=said, max_tokens=99, stream=True, tools=[tool])
            told = [event async for event in events]
        texts = [e.delta.text for e in told if e.type == "content_block_delta" and e.delta.type == "text_delta"]
        assert texts == ["Let me s", "ee."]
        blocks = [event.content_block.type for event in told if event.type == "content_block_start"]
        assert blocks == ["text", "tool_use"]

    async def run() -> None:
        async with world(calling) as here:
            for program in (by_chat, by_responses, by_messages):
                here.engine = engine = Stepwise(calling)
                playing = asyncio.ensure_future(here.play(program))
                await engine.reach(1)
                while not playing.done():  # so slowly that every chunk is told by itself
                    engine.let(1)
                    await asyncio.wait({playing}, timeout=0.02)
                episode = await playing
                assert episode.status is EpisodeStatus.FINISHED, episode.cause

    asyncio.run(run())


@pytest.mark.parametrize("name", STREAMS)
def test_an_answer_that_breaks_in_the_middle_of_its_stream_is_told_as_an_error_of_the_protocol(name: str) -> None:
    async def program(access: Access) -> None:
        async def listen() -> None:
            async for text in STREAMS[name](access):
                told.append(text)

        with pytest.raises((openai.APIError, anthropic.APIError), match="its logits are not finite"):
            await listen()
        engine.breaks_after = None
        told.append("again")
        told.extend([text async for text in STREAMS[name](access)])

    async def run() -> None:
        nonlocal engine
        async with world(lambda _: NUMBERS) as here:
            here.engine = engine = Stepwise(lambda _: NUMBERS)
            engine.breaks_after = 2
            engine.let(999)
            episode = await here.play(program)
        assert episode.status is EpisodeStatus.FINISHED, episode.cause

    engine: Any = None
    told: list[str] = []
    asyncio.run(run())
    place = told.index("again")
    assert NUMBERS.startswith("".join(told[:place]))
    assert "".join(told[place + 1 : -1]) == told[-1] == NUMBERS


def test_two_hundred_streams_at_once_each_tell_their_own_answer() -> None:
    def answer(text: str) -> str:
        return f"{text.partition('[user]')[2].partition('<eos>')[0]}! " + NUMBERS

    async def program(number: int, access: Access) -> None:
        said: Any = [{"role": "user", "content": f"I am {number}"}]
        if number % 2:
            events: Any = await clients.claude(access).messages.create(
                model="m", messages=said, max_tokens=999, stream=True
            )
            text = "".join([event.delta.text async for event in events if event.type == "content_block_delta"])
        else:
            chunks = await clients.oai(access).chat.completions.create(model="m", messages=said, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert text == f"I am {number}! {NUMBERS}"

    async def run() -> None:
        nonlocal clients
        clients = agents.Clients()
        async with world(answer) as here:
            episodes = await asyncio.gather(*(here.play(partial(program, number)) for number in range(200)))
        await clients.close()
        for number, episode in enumerate(episodes):
            assert episode.status is EpisodeStatus.FINISHED, episode.cause
            assert TOKENIZER.decode(sampled(episode)) == f"I am {number}! {NUMBERS}<eos>"
        assert sum(len(sampled(episode)) for episode in episodes) == len(here.engine.sampled)

    clients: Any = None
    asyncio.run(run())
