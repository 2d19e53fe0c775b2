"""Episodes that programs reach over HTTP: a real endpoint and real conversations over a scripted policy."""

from __future__ import annotations

import asyncio
import json
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.base.clock import RealClock
from headrace.base.types.chat import Message, Tool
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, StopReason, Turn
from headrace.base.types.sampling import Sampling
from headrace.base.types.scored import paths
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import PLAIN, RequestOptions, TokenChunk
from headrace.launch.endpoints import ListenAddress
from headrace.models.tiny import char_tokenizer
from headrace.rollout import EnginePolicy, EpisodeRunner
from headrace.rollout.chat import Chat
from headrace.rollout.conversations import Conversations
from headrace.rollout.conversations import EpisodeLimits as Budgets
from headrace.rollout.environments.base import AttemptOutcome, OpenEpisode, SingleTurn
from headrace.wings.agents import Access, Endpoint, SessionLimits

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}{{ ' ' + m.name if m.name else '' }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = char_tokenizer(string.printable + "é☃", TEMPLATE)
EOS = TOKENIZER.eos_token_id
SAMPLING = Sampling(max_new_tokens=400, stop_ids=(EOS,))
ADD = Tool(
    name="add",
    description="Adds two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
)
TASK = Task(row_index=0, row={}, prompt="", prompt_ids_T=np.zeros(0, np.int32))
HANG = "HANG"
"""An answer that has begun with this goes no further."""


def calling(text: str) -> str:
    """A policy that adds with the tool: it calls it for every question, and says what the tool said."""
    said = text.rpartition("[assistant]")[0].rpartition("[")[2]
    if said.startswith("tool add]"):
        return f"It is {said.removeprefix('tool add]').removesuffix('<eos>')}."
    a, _, b = said.removeprefix("user]").removesuffix("<eos>").partition("+")
    return f'Let me see.<tool_call>{{"name": "add", "arguments": {{"a":{a}, "b": {b}}}}}</tool_call>'


class ScriptedEngine:
    """An engine whose policy answers a text by a text; it remembers every token that it gave out."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self.sampled: list[int] = []
        self.num_running = 0
        self.num_asked = 0
        self.patient = True
        """Whether what hangs continues hanging."""
        self.hung = asyncio.Event()
        self._changed = asyncio.Condition()

    async def generate(
        self, prompt_ids_T: IntColumn, sampling: Sampling, options: RequestOptions = PLAIN
    ) -> AsyncIterator[TokenChunk]:
        self.num_asked += 1
        text = self.answer(TOKENIZER.decode(prompt_ids_T.tolist()))
        ids = [*TOKENIZER.encode(text), EOS]
        stops = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        length = min([len(ids), sampling.max_new_tokens, *stops])
        reason = StopReason.STOP if stops or length == len(ids) else StopReason.LENGTH
        await self._count(1)
        try:
            held = 0 if options.answer_ids_T is None else len(options.answer_ids_T)
            for start in range(held, length, 8):
                part = ids[start : min(start + 8, length)]
                await asyncio.sleep(0)
                self.sampled += part
                yield TokenChunk(tokens=drawn(part, start), stop_reason=reason if start + 8 >= length else None)
                if text.startswith(HANG) and self.patient:
                    self.hung.set()
                    await asyncio.Event().wait()
        finally:
            await self._count(-1)

    async def reach(self, num_running: int) -> None:
        """Until so many answers are under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == num_running)

    async def _count(self, by: int) -> None:
        async with self._changed:
            self.num_running += by
            self._changed.notify_all()


def drawn(ids: list[int], start: int) -> Tokens:
    places = np.arange(start, start + len(ids))
    return Tokens(ids_T=np.array(ids), logprobs_T=-0.01 * (1 + places), versions_T=np.zeros(len(ids), np.int32))


def open_episode(engine: ScriptedEngine) -> Conversations:
    """An episode that is under way, and that nobody runs."""
    runner = EpisodeRunner(
        engine=engine,  # type: ignore[arg-type]
        env=SingleTurn(),
        sampling=SAMPLING,
        run_seed=0,
        on_tokens=lambda _: None,
    )
    policy = EnginePolicy(runner=runner, key=EpisodeKey(0, 0))
    return Conversations(policy, Budgets(), chat=Chat.create(TOKENIZER, (EOS,)), seed=0, note=lambda _: None)


Program = Callable[[Access], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class World:
    """An endpoint and the policy behind it."""

    endpoint: Endpoint
    engine: ScriptedEngine
    budgets: Budgets
    warnings: list[str] = field(default_factory=list)
    num_episodes: int = 0

    async def play(self, program: Program) -> EpisodeGraph:
        """One episode, in which ``program`` does what it likes."""
        endpoint = self.endpoint

        class Played:
            begins_with_prompt = False

            async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
                async with endpoint.session(episode) as access:
                    await program(access)
                return AttemptOutcome(reward=1.0)

        return await self._run(Played())

    async def direct(self, program: Callable[[OpenEpisode], Awaitable[None]]) -> EpisodeGraph:
        """One episode, without any protocol."""

        class Played:
            begins_with_prompt = False

            async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
                await program(episode)
                return AttemptOutcome(reward=1.0)

        return await self._run(Played())

    async def _run(self, env: Any) -> EpisodeGraph:
        self.num_episodes += 1
        runner = EpisodeRunner(
            engine=self.engine,  # type: ignore[arg-type]
            env=env,
            sampling=SAMPLING,
            run_seed=0,
            on_tokens=lambda _: None,
            limits=self.budgets,
            chat=Chat.create(TOKENIZER, (EOS,)),
        )
        return await runner.run(EpisodeKey(0, self.num_episodes), TASK)


@asynccontextmanager
async def world(
    answer: Callable[[str], str] = calling,
    *,
    limits: SessionLimits | None = None,
    budgets: Budgets | None = None,
    at: ListenAddress | None = None,
) -> AsyncIterator[World]:
    """In which every wait has an end."""
    warnings: list[str] = []
    async with (
        asyncio.timeout(60),
        Endpoint.listening(
            SAMPLING, clock=RealClock(), warn=warnings.append, at=at or ListenAddress(), limits=limits
        ) as endpoint,
    ):
        yield World(endpoint=endpoint, engine=ScriptedEngine(answer), warnings=warnings, budgets=budgets or Budgets())


def samples(episode: EpisodeGraph) -> list[tuple[Any, ...]]:
    """What is trained of an episode, with everything that is recorded of it."""
    return [
        (
            sample.tokens.ids_T.tolist(),
            sample.mask_T.tolist(),
            sample.tokens.logprobs_T.tolist(),
            sample.tokens.versions_T.tolist(),
        )
        for sample in paths(episode, 1.0)
    ]


def sampled(episode: EpisodeGraph) -> list[int]:
    """Every sampled token, turn after turn."""
    return sampled_in(episode.turns)


def sampled_in(turns: Sequence[Turn]) -> list[int]:
    return [int(token) for turn in turns for token in turn.tokens.ids_T[turn.tokens.sampled_T]]


async def add_directly(episode: OpenEpisode, questions: tuple[str, ...] = ("2+3", "40+2")) -> None:
    """What the agents of the tests do, in our own words."""
    messages = [Message(role="system", content="Be brief.")]
    for question in questions:
        messages.append(Message(role="user", content=question))
        while True:
            reply = await episode.reply(messages, (ADD,))
            messages.append(reply.message)
            for call in reply.message.tool_calls:
                given = json.loads(call.arguments)
                answer = str(given["a"] + given["b"])
                messages.append(Message(role="tool", content=answer, tool_call_id=call.id, name=call.name))
            if not reply.message.tool_calls:
                break
