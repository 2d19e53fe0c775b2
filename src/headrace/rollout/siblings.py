"""The run of all episodes of a group together, for environments in which each episode is one answer to the same prompt.
The result is the same as from :class:`~headrace.rollout.runner.EpisodeRunner`, with much less work per episode."""

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
from headrace.rollout.environments.base import SingleTurn
from headrace.rollout.history import prompt_digest
from headrace.rollout.runner import (
    EpisodeRunner,
    cause_of_refusal,
    episode_seed,
    make_sampled_turn,
    make_session_name,
    timeout_cause,
)

OnEnded = Callable[[Sequence[EpisodeGraph]], Awaitable[None]]
"""A callback that receives episodes that have ended at the same time."""
_AUTHOR = ChatOptions().agent
"""The author name of every answer, which is the policy's."""


@dataclass(slots=True)
class _Answer:
    """The state of one answer while it is sampled."""

    key: EpisodeKey
    """The episode of which the answer is the only sampled turn."""
    chunks: list[TokenChunk] = field(default_factory=list)
    """The chunks that have arrived, without chunks that were lost."""
    running: bool = True
    """Whether the last chunk has not arrived yet."""

    def turns(self, prompt: Turn) -> list[Turn]:
        """Return the two turns of the answer's episode: ``prompt``, which comes from the task, and the answer."""
        return [prompt, make_sampled_turn(self.chunks, author=_AUTHOR, parent=0)]


class _RunningGroup:
    """The state of one group while it runs: its prompt, its answers, and the episodes that have ended."""

    def __init__(self, number: int, size: int, prompt_ids_T: IntColumn, prompt_suffix: str) -> None:
        """Create group ``number`` with ``size`` answers to the prompt ``prompt_ids_T``. ``prompt_suffix`` is appended
        to the digest of the prompt."""
        self.prompt = Turn(author="task", tokens=Tokens.observed(prompt_ids_T))
        self.digest = prompt_digest(prompt_ids_T) + prompt_suffix
        """The digest of the prompt. After a restart it identifies the recorded tokens of the answers."""
        self.answers = [_Answer(EpisodeKey(number, place)) for place in range(size)]
        self.ended: dict[EpisodeKey, EpisodeGraph] = {}
        """Episodes that have ended while their call of ``on_ended`` has not returned yet."""


class SiblingRunner:
    """A runner of groups in which each episode is one answer to the group's prompt. All answers are requested from the
    engine in one call, and chunks that arrive together are processed together."""

    def __init__(self, runner: EpisodeRunner, engine: SiblingSource) -> None:
        """Create a runner that uses the sampling parameters, the seeds and the callbacks of ``runner``. ``engine`` is
        the engine of ``runner``."""
        self._runner = runner
        self._engine = engine
        adapter = runner.agents.adapter(_AUTHOR)
        self._options = RequestOptions(agent=adapter)
        """The options of every request, before the session of its episode is set."""
        self._prompt_suffix = f"/{_AUTHOR}" if adapter else ""
        """The text after a prompt's digest that identifies recorded tokens of an adapter; empty without an adapter."""

    @classmethod
    def from_runner(cls, runner: EpisodeRunner) -> SiblingRunner | None:
        """Return a runner of groups for the episodes of ``runner``, or ``None`` if each of these episodes needs a run
        of its own. That is the case if their environment does more than sample one answer, if they may be attempted
        again, if the policy's weights are frozen, or if the engine does not support sibling requests."""
        is_single = isinstance(runner.env, SingleTurn) and not runner.retries
        is_frozen = runner.agents.frozen(_AUTHOR) is not None
        if not is_single or is_frozen or not isinstance(runner.engine, SiblingSource):
            return None
        return cls(runner, runner.engine)

    async def run(self, number: int, size: int, task: Task, on_ended: OnEnded) -> None:
        """Run the ``size`` episodes of group ``number``, attempts at ``task``, and return when all have ended.
        ``on_ended`` is called with the episodes that end together. A request that the engine refuses fails only its own
        episode. When the time limit expires, all episodes that still run fail. The death of a component is raised."""
        group = _RunningGroup(number, size, task.prompt_ids_T, self._prompt_suffix)
        requests = [self._request(answer.key, len(task.prompt_ids_T)) for answer in group.answers]

        async def receive(arrived: Sequence[tuple[int, TokenChunk]]) -> None:
            """Record chunks of the answers, and deliver the episodes that end with them."""
            await self._deliver(group, self._record(group, arrived), on_ended)

        limit = TimeLimit(self._runner.timeout_s)
        try:
            async with limit:
                await self._engine.generate_siblings(task.prompt_ids_T, requests, receive)
        except TimeoutError:
            if not limit.scope.expired():
                raise
            late = [episode for answer in group.answers if (episode := self._fail_late(group, answer))]
            await self._deliver(group, [*group.ended.values(), *late], on_ended)

    async def _deliver(self, group: _RunningGroup, ended: Sequence[EpisodeGraph], on_ended: OnEnded) -> None:
        """Call ``on_ended`` with the episodes ``ended`` of ``group``. They stay in ``group.ended`` until the call
        returns, so that they are delivered again if the time limit interrupts the call."""
        if not ended:
            return
        group.ended.update({episode.key: episode for episode in ended})
        await on_ended(ended)
        for episode in ended:
            del group.ended[episode.key]

    def _record(self, group: _RunningGroup, arrived: Sequence[tuple[int, TokenChunk]]) -> list[EpisodeGraph]:
        """Record the chunks ``arrived`` of answers of ``group``, and return the episodes that end with them. Each chunk
        comes with the index of its answer."""
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
                ended.append(self._finish(group, answer, part))
        runner.on_tokens(sum([len(chunk.tokens.ids_T) for _, chunk in arrived]))
        return ended

    def _request(self, key: EpisodeKey, prompt_length: int) -> SiblingRequest:
        """Return the request for the answer of the episode ``key``. ``prompt_length`` is the number of tokens of the
        prompt."""
        runner = self._runner
        limits = runner.limits
        max_new_tokens = runner.sampling.max_new_tokens
        if limits.max_context is not None:
            max_new_tokens = min(max_new_tokens, limits.max_context - prompt_length)
        if limits.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, limits.max_tokens)
        sampling = msgspec.structs.replace(
            runner.sampling, seed=episode_seed(runner.run_seed, key), max_new_tokens=max_new_tokens
        )
        return SiblingRequest(
            sampling, msgspec.structs.replace(self._options, session=make_session_name(runner.run_seed, key))
        )

    def _finish(self, group: _RunningGroup, answer: _Answer, last: TokenChunk) -> EpisodeGraph:
        """Mark ``answer`` of ``group`` as complete and return its episode. ``last`` is the last chunk of the answer; if
        it contains an error, the episode has failed."""
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

    def _fail_late(self, group: _RunningGroup, answer: _Answer) -> EpisodeGraph | None:
        """Return the failed episode of ``answer``, an answer of ``group``, if it was still running when the time limit
        expired; ``None`` if it had ended before."""
        if not answer.running:
            return None
        cause = timeout_cause(self._runner.timeout_s)
        turns = answer.turns(group.prompt)
        return EpisodeGraph(key=answer.key, turns=turns, status=EpisodeStatus.FAILED, cause=cause)
