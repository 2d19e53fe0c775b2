"""What an environment is to the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn

AS_THE_RUN = ChatOptions()
"""Everything as the run samples."""


class Answering(Protocol):
    """Who answers in an episode."""

    seed: int
    """For the environment's own draws: fixed by the run's seed and the episode's key."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        """The model's answer to ``messages``, which may call ``tools``.

        Raises :class:`~headrace.base.errors.BudgetSpent`, :class:`~headrace.base.errors.EpisodeError` and
        :class:`~headrace.base.errors.RequestError`.
        """
        ...

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """The model's answer to these tokens, which are everything that it reads."""
        ...


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True):
    """What has become certain of an answer that is still being sampled."""

    num_prompt_tokens: int
    """That the model has read for it."""
    reasoning: str = ""
    """To be appended to what came before."""
    content: str = ""
    """To be appended to what came before; nothing of the reasoning comes after it."""


Hear = Callable[[AnswerPiece], None]
"""Told of an answer while it is sampled. The pieces together are the reasoning and the content of the whole message;
calls of tools come with the whole alone."""


class OpenEpisode(Answering, Protocol):
    """An episode that is under way: it answers, and keeps what was sampled."""

    key: EpisodeKey

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        hear: Hear | None = None,
    ) -> Reply:
        """As anybody is answered; ``hear`` is told what becomes certain of it meanwhile."""
        ...

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """How many tokens the model would read for an answer to these."""
        ...

    def spell(self, token: int) -> str:
        """A token as text, a special one too."""
        ...

    def begin_again(self) -> None:
        """Forget what was said, without fault of this episode: the same asks get the answers that they got."""
        ...


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt came to."""

    reward: float | None = None
    """What it earned; ``None`` where the run's reward function is to say."""
    turn_rewards: dict[int, float] = {}
    """What of it was earned at single turns."""
    agent_rewards: dict[str, float] = {}
    """What each agent earned, where that is told apart."""
    trained: tuple[int, ...] | None = None
    """The sampled turns that carry loss; ``None``: all of them."""


class Environment(Protocol):
    """An environment attempts tasks; one instance serves all episodes, so it keeps no state of an episode."""

    asks_prompt: bool
    """Whether an episode begins with the prompt of its task, and nothing else."""

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """One attempt. An exception fails this episode only."""
        ...
