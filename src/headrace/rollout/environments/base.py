"""The contract between the runner of episodes and an environment. :class:`Environment` is what an environment
implements, and :class:`OpenEpisode` is what the runner passes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.episode import AttemptKind, EpisodeKey
from headrace.base.types.task import Task
from headrace.base.types.tokens import IntColumn

AS_THE_RUN = ChatOptions()
"""The options of an answer that is sampled with the parameters of the run."""


class Answering(Protocol):
    """An object that samples the model's answers in an episode. It is the part of :class:`OpenEpisode` that user code
    needs."""

    seed: int
    """A seed for the environment's own random draws. It depends only on the run's seed and the episode's key."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: ChatOptions = AS_THE_RUN
    ) -> Reply:
        """Return the model's answer to ``messages``. The answer may contain calls of ``tools``.

        Raises :class:`~headrace.base.errors.BudgetSpent`, :class:`~headrace.base.errors.EpisodeError` and
        :class:`~headrace.base.errors.RequestError`.
        """

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the model's answer to ``prompt_ids_T``, the complete input of the model."""


class AnswerPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed answer. Later tokens cannot change it."""

    num_prompt_tokens: int
    """The number of tokens of the prompt."""
    reasoning: str = ""
    """Text to append to the reasoning."""
    content: str = ""
    """Text to append to the content. No more reasoning follows after content."""


OnPiece = Callable[[AnswerPiece], None]
"""A function that receives the pieces of an answer while it is sampled. The concatenated pieces are the reasoning and
the content of the message; tool calls are part of the complete message only."""


class OpenEpisode(Answering, Protocol):
    """An episode in progress: it samples answers and records what was sampled. The runner of episodes passes it to
    :meth:`Environment.run`."""

    key: EpisodeKey
    """The group and the number of the episode."""
    attempt_kind: AttemptKind
    """Whether the episode stands alone, may have branches, or is a branch itself."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Return the model's answer to ``messages``. ``on_piece`` receives the pieces of the answer while it is
        sampled."""

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return how many tokens the model would read to answer ``messages`` if it is offered ``tools``."""

    def spell(self, token: int) -> str:
        """Return the text of a token, including special tokens."""

    def restart(self) -> None:
        """Discard the conversation before another attempt, after a failure that the model did not cause. Equal requests
        then receive the same answers again."""


LAST = -1
"""The key for columns about the last answer of an attempt, used in place of the index of a turn."""


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an attempt at a task, as its environment returns it."""

    reward: float | None = None
    """The reward of the attempt; ``None`` if the run's reward function computes it."""
    turn_rewards: dict[int, float] = {}
    """The part of the reward that a turn earned, by the index of the turn."""
    agent_rewards: dict[str, float] = {}
    """The reward of each agent, by agent name, if agents are rewarded separately."""
    trained: tuple[int, ...] | None = None
    """The indices of the sampled turns that carry loss; ``None`` means all of them."""
    turn_extra: dict[int, dict[str, str | float]] = {}
    """The columns that the environment has recorded about a turn, by the index of the turn, or by :data:`LAST` for the
    last answer."""


class Environment(Protocol):
    """An environment that attempts tasks. All episodes share one instance, so it stores no state of an episode."""

    begins_with_prompt: bool
    """Whether an episode begins with exactly the prompt of its task."""

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Attempt ``task`` and return the outcome. ``episode`` samples the model's answers. An exception fails this
        episode only."""


class SingleTurn:
    """An environment in which the model reads the prompt and answers once."""

    begins_with_prompt = True

    async def run(self, task: Task, episode: OpenEpisode) -> AttemptOutcome:
        """Sample one answer to the prompt of ``task``. The returned outcome contains no reward, so the run's reward
        function computes it."""
        await episode.sample(task.prompt_ids_T)
        return AttemptOutcome()
