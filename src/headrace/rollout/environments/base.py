"""The contract of an environment, as the controller sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.episode import AttemptKind, EpisodeKey
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn

AS_THE_RUN = ChatOptions()
"""The options of an answer that is sampled as the run samples."""


class Answering(Protocol):
    """An object that answers in an episode; what user code needs of an episode."""

    seed: int
    """A seed for the environment's own draws, fixed by the run's seed and the episode's key."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        """Return the model's answer to ``messages``, which may call ``tools``.

        Raises :class:`~headrace.base.errors.BudgetSpent`, :class:`~headrace.base.errors.EpisodeError` and
        :class:`~headrace.base.errors.RequestError`.
        """
        ...

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the model's answer to these tokens, which are its whole input."""
        ...


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer that later tokens cannot change."""

    num_prompt_tokens: int
    """The number of tokens of the prompt."""
    reasoning: str = ""
    """Text to be appended to the reasoning."""
    content: str = ""
    """Text to be appended to the content; no reasoning follows it."""


OnPiece = Callable[[AnswerPiece], None]
"""A function that is called with the pieces of an answer while it is sampled. Together they are the reasoning and the
content of the whole message; calls of tools come only with the whole message."""


class OpenEpisode(Answering, Protocol):
    """An episode in progress: it answers, and records what was sampled. The controller gives it to
    :meth:`Environment.run`."""

    key: EpisodeKey
    """The group and the number of the episode."""
    attempt_kind: AttemptKind
    """Whether branches may leave the episode, or it is one."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Return the model's answer to ``messages``; ``on_piece`` is called with its pieces meanwhile."""
        ...

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return how many tokens the model would read to answer these messages."""
        ...

    def spell(self, token: int) -> str:
        """Return the text of a token, special tokens included."""
        ...

    def restart(self) -> None:
        """Discard the conversation, for an attempt that has to be made again without fault of the model. The same
        requests get the same answers."""
        ...


LAST = -1
"""The key, in place of the index of a turn, of columns about the last answer of an attempt."""


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an attempt at a task, as its environment returns it."""

    reward: float | None = None
    """The reward; ``None``: the run's reward function decides."""
    turn_rewards: dict[int, float] = {}
    """The shares of the reward that single turns earned, by their indices."""
    agent_rewards: dict[str, float] = {}
    """The reward of each agent, where agents are rewarded separately."""
    trained: tuple[int, ...] | None = None
    """The sampled turns that carry loss; ``None``: all of them."""
    turn_extra: dict[int, dict[str, str | float]] = {}
    """The columns that the environment has recorded about single turns, by their indices; by :data:`LAST`, about the
    last answer."""


class Environment(Protocol):
    """An environment that attempts tasks. One instance serves all episodes, so it keeps no state of an episode."""

    asks_prompt: bool
    """Whether an episode begins with the prompt of its task and nothing else."""

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Attempt ``task``, in which ``episode`` gives the model's answers, and return the outcome. An exception fails
        this episode only."""
        ...


class SingleTurn:
    """An environment in which the model reads the prompt and answers once."""

    asks_prompt = True

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Sample one answer to the prompt of ``task``; the run's reward function decides about its reward."""
        await episode.sample(task.prompt_ids_T)
        return AttemptOutcome()
