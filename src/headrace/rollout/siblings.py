"""The run of all episodes of one group together, where each is one answer to the same prompt. It gives the same
episodes as :class:`~headrace.rollout.runner.EpisodeRunner`, for a fraction of the work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.base.clock import TimeLimit
from headrace.base.errors import RequestError
from headrace.base.types.chat import ChatOptions
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus, TokenChunk, Turn
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.engine import RequestOptions, SiblingRequest, SiblingSource
from headrace.rollout.agents import Agents
from headrace.rollout.environments.base import SingleTurn
from headrace.rollout.history import prompt_digest
from headrace.rollout.runner import (
    CUT_OFF,
    EpisodeRunner,
    cause_of_refusal,
    episode_seed,
    session_of,
    timeout_cause,
)

OnEnded = Callable[[Sequence[EpisodeGraph]], Awaitable[None]]
"""Called with episodes that have ended together."""
_AUTHOR = ChatOptions().agent
"""The author of an answer: the policy."""


@dataclass(slots=True)
class _Answer:
    """One answer that is being sampled."""

    key: EpisodeKey
    chunks: list[TokenChunk] = field(default_factory=list)
    """The chunks that have arrived and are not lost."""
    running: bool = True
    """Whether its last chunk has not arrived."""

    def turns(self, prompt: Turn) -> list[Turn]:
        """Return the turns of its episode, whose task gave the turn ``prompt``."""
        routings = (chunk.prompt_routing for chunk in self.chunks if chunk.prompt_routing is not None)
        stop = self.chunks[-1].stop_reason if self.chunks else None
        answer = Turn(
            author=_AUTHOR,
            tokens=Tokens.concat([chunk.tokens for chunk in self.chunks]),
            parent=0,
            stop_reason=stop,
            context_routing=next(routings, None),
            untrained="" if stop else CUT_OFF,
        )
        return [prompt, answer]


class _RunningGroup:
    """One group that runs: its prompt and its answers."""

    def __init__(self, number: int, size: int, prompt_ids_T: IntColumn, other_prompt: str) -> None:
        """Begin the group ``number`` of ``size`` answers to a prompt. ``other_prompt`` is added to the digest of the
        prompt."""
        self.prompt = Turn(author="task", tokens=Tokens.observed(prompt_ids_T))
        self.digest = prompt_digest(prompt_ids_T) + other_prompt
        """The digest by which recorded tokens of the answers are found again."""
        self.answers = [_Answer(EpisodeKey(number, place)) for place in range(size)]
        self.ended: dict[EpisodeKey, EpisodeGraph] = {}
        """Episodes that have ended and that the rollout loop has not taken yet."""


class SiblingRunner:
    """A runner of groups whose episodes are one answer each to the group's prompt. The answers are requested from the
    engine in one call, and the chunks that arrive together are handled together."""

    def __init__(self, runner: EpisodeRunner, engine: SiblingSource) -> None:
        """Run groups as ``runner`` would run their episodes one by one, with its sampling, seeds and callbacks.
        ``engine`` is the runner's engine."""
        self._runner = runner
        self._engine = engine
        adapter = runner.agents.adapter(_AUTHOR)
        self._options = RequestOptions(agent=adapter)
        self._other_prompt = f"/{_AUTHOR}" if adapter else ""

    @classmethod
    def of(cls, runner: EpisodeRunner) -> SiblingRunner | None:
        """Return a runner of groups for the episodes of ``runner``; ``None`` if these need one run each: their
        environment does more than to sample an answer, they may be attempted again, their answers are not the policy's,
        or the engine samples no siblings."""
        single = isinstance(runner.env, SingleTurn) and not runner.retries
        if not single or not isinstance(runner.engine, SiblingSource) or not _from_policy(runner.agents):
            return None
        return cls(runner, runner.engine)

    async def run(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run the ``size`` episodes of group ``number``, and return when all have ended. ``on_ended`` is called with
        those that end together. A request that the engine refuses fails its episode only; the end of the time limit
        fails those that still run; the death of a component is raised."""
        group = _RunningGroup(number, size, task.prompt_ids_T, self._other_prompt)
        requests = [self._request(answer.key, len(task.prompt_ids_T)) for answer in group.answers]

        async def take(arrived: Sequence[tuple[int, TokenChunk]]) -> None:
            """Record chunks of the answers, and pass the episodes on that have ended with them."""
            await self._pass_on(group, self._taken(group, arrived), on_ended)

        limit = TimeLimit(self._runner.timeout_s)
        try:
            async with limit:
                await self._engine.generate_siblings(task.prompt_ids_T, requests, take)
        except TimeoutError:
            if not limit.scope.expired():
                raise
            late = [episode for answer in group.answers if (episode := self._late(group, answer))]
            await self._pass_on(group, [*group.ended.values(), *late], on_ended)

    async def _pass_on(self, group: _RunningGroup, ended: Sequence[EpisodeGraph], on_ended: OnEnded) -> None:
        """Pass episodes on that have ended. They are kept until they have been taken, in case the time limit interrupts
        that."""
        if not ended:
            return
        group.ended.update({episode.key: episode for episode in ended})
        await on_ended(ended)
        for episode in ended:
            del group.ended[episode.key]

    def _taken(self, group: _RunningGroup, arrived: Sequence[tuple[int, TokenChunk]]) -> list[EpisodeGraph]:
        """Record chunks that have arrived for the answers of a group, and return the episodes that have ended with
        them."""
        runner = self._runner
        ended = []
        for index, chunk in arrived:
            answer = group.answers[index]
            part = msgspec.structs.replace(chunk, key=answer.key, prompt=group.digest)
            if part.lost:
                answer.chunks.clear()
            if not part.error:
                answer.chunks.append(part)
                runner.on_part(part)
            if part.ended:
                ended.append(self._ended(group, answer, part))
        runner.on_tokens(sum([len(chunk.tokens.ids_T) for _, chunk in arrived]))
        return ended

    def _request(self, key: EpisodeKey, prompt_length: int) -> SiblingRequest:
        """Return the request for the answer of the episode ``key`` to a prompt of ``prompt_length`` tokens."""
        runner = self._runner
        limits = runner.limits
        most = runner.sampling.max_new_tokens
        if limits.max_context is not None:
            most = min(most, limits.max_context - prompt_length)
        if limits.max_tokens is not None:
            most = min(most, limits.max_tokens)
        sampling = msgspec.structs.replace(
            runner.sampling, seed=episode_seed(runner.run_seed, key), max_new_tokens=most
        )  # fmt: skip
        return SiblingRequest(
            sampling, msgspec.structs.replace(self._options, session=session_of(runner.run_seed, key))
        )

    def _ended(self, group: _RunningGroup, answer: _Answer, last: TokenChunk) -> EpisodeGraph:
        """Return the episode whose answer has ended with the chunk ``last``."""
        answer.running = False
        episode = EpisodeGraph(key=answer.key, turns=answer.turns(group.prompt), status=EpisodeStatus.FINISHED)
        answer.chunks.clear()  # the turn has copies of their tokens, and siblings may run for long
        try:
            last.raise_error()
        except RequestError as error:
            episode.status = EpisodeStatus.FAILED
            episode.cause = cause_of_refusal(error, episode.turns[-1].tokens)
        else:
            self._runner.on_turn(answer.key, group.prompt.tokens.ids_T, episode.turns[-1])
        return episode

    def _late(self, group: _RunningGroup, answer: _Answer) -> EpisodeGraph | None:
        """Return the episode of an answer that the time limit has ended; ``None`` if it had ended before."""
        if not answer.running:
            return None
        cause = timeout_cause(self._runner.timeout_s)
        turns = answer.turns(group.prompt)
        return EpisodeGraph(key=answer.key, turns=turns, status=EpisodeStatus.FAILED, cause=cause)


def _from_policy(agents: Agents) -> bool:
    """Return whether answers of the policy come from its own engine, and not from one with frozen weights."""
    return agents.frozen(_AUTHOR) is None
