"""What user code asks the model with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.rollout.environments.base import Answering
from headrace.rollout.environments.interface import Messages, as_messages
from headrace.rollout.environments.tools import ToolFunction, call_tools

Tools = Sequence[Tool | Callable[..., Any]]
"""What the model may call: functions with types and docstrings, or descriptions alone."""


class Options(TypedDict, total=False):
    """How one answer is asked for; what is left out is as the run samples."""

    max_new_tokens: int
    """Never more than ``engine.max_new_tokens``."""
    temperature: float
    """An answer that is sampled otherwise than the run samples carries no loss (``other_sampling``)."""
    top_p: float
    """As for ``temperature``."""
    top_k: int
    """As for ``temperature``."""
    stop: Sequence[str]
    """The answer ends with the first of these strings, which is no part of its content."""
    agent: str
    """Who answers: the name under which the turn stands in the episode. ``[[env.agents]]`` says whose weights that
    are; several agents of one role are called ``role/0``, ``role/1``."""


class EpisodePolicy:
    """The model under training, as a rollout sees it, for one episode.

    Several answers may be asked for at once (``asyncio.gather``), in any number of conversations: what continues one
    that is held is read behind its tokens, as they were sampled, and anything else begins a branch of its own.
    """

    def __init__(
        self,
        episode: Answering,
        *,
        prompt_ids: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._episode = episode
        self._executor = executor
        self._functions: dict[Callable[..., Any], ToolFunction] = {}
        self.seed = episode.seed
        """For draws of the rollout: another one for every episode of a run, and the same in a repetition."""
        self.prompt_ids = tuple(prompt_ids)
        """The tokens of the row's prompt, chat template applied; empty where rows have none."""
        self.variables = dict(variables or {})
        """Environment variables for programs that this episode starts: they lead clients to it."""

    @property
    def base_url(self) -> str:
        """Where clients of OpenAI's and of Anthropic's protocol reach this episode."""
        return self._variable("ANTHROPIC_BASE_URL")

    @property
    def api_key(self) -> str:
        """The key of this episode there."""
        return self._variable("ANTHROPIC_API_KEY")

    def _variable(self, name: str) -> str:
        if name not in self.variables:
            raise EpisodeError(
                "this episode cannot be reached over HTTP", remedy="set env.kind = 'rollout' or 'program'"
            )
        return self.variables[name]

    async def chat(self, messages: Messages, *, tools: Tools = (), **options: Unpack[Options]) -> Reply:
        """The model's answer. ``reply.message`` is to be appended to the messages as it is.

        Raises :class:`~headrace.base.errors.BudgetSpent` where the episode may have no more answers, and
        :class:`~headrace.base.errors.RequestError` for what the engine cannot serve.
        """
        described = [tool if isinstance(tool, Tool) else self._function(tool).tool for tool in tools]
        return await self._episode.reply(as_messages(messages), described, _as_options(options))

    async def sample(self, ids: Sequence[int], **options: Unpack[Options]) -> Reply:
        """The model's answer to these tokens, which are everything that it reads."""
        return await self._episode.sample(np.asarray(ids, np.int32), _as_options(options))

    async def call_tools(self, message: Message, tools: Sequence[Callable[..., Any]]) -> list[Message]:
        """What the functions that ``message`` calls answer, to be appended to the messages. Plain functions run in a
        thread; what one raises is its answer."""
        functions = {made.tool.name: made for made in map(self._function, tools)}
        return await call_tools(message, functions, self._executor)

    def _function(self, function: Callable[..., Any]) -> ToolFunction:
        if function not in self._functions:
            self._functions[function] = ToolFunction(function)
        return self._functions[function]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout may return in place of a number."""

    reward: float | None = None
    """What the episode earned; ``None``: the run's reward function is to say."""
    rewards: Mapping[int, float] = {}
    """What of it single answers earned, by ``reply.turn``."""
    agent_rewards: Mapping[str, float] = {}
    """What each agent earned, by its name: then its answers are credited with that alone, and compared with what agents
    of its role earned in the group. ``reward`` is what is measured and filtered by; unset, the mean over agents whose
    answers carry loss."""
    trained: Sequence[Reply] | None = None
    """The answers that carry loss (``not_chosen`` is why the others do not); ``None``: all of them."""


def _as_options(options: Mapping[str, Any]) -> ChatOptions:
    try:
        return msgspec.convert(dict(options), ChatOptions)
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"options of an answer: {error}", remedy="look at headrace.rollout.environments.policy.Options"
        ) from None


Policy = EpisodePolicy
"""The name under which rollouts of users annotate their first parameter."""
