"""The model under training, as user code sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.episode import AttemptKind
from headrace.rollout.environments.base import Answering
from headrace.rollout.environments.interface import Messages, as_messages
from headrace.rollout.environments.tools import DescribedTool, ToolFunction, call_tools, described

Tools = Sequence[Tool | Callable[..., Any]]
"""The tools that the model may call: functions with types and docstrings, or descriptions only."""


class Options(TypedDict, total=False):
    """The options of one answer. Options that are left out are those of the run."""

    max_new_tokens: int
    """The most tokens of the answer, at most ``engine.max_new_tokens``."""
    temperature: float
    """The sampling temperature. An answer sampled with other parameters than the run's carries no loss
    (``other_sampling``)."""
    top_p: float
    """The top-p limit; see ``temperature``."""
    top_k: int
    """The top-k limit; see ``temperature``."""
    stop: Sequence[str]
    """Strings that end the answer; the first one to appear ends it, and is not part of its content."""
    agent: str
    """The agent that answers: the author of the turn in the episode. ``[[env.agents]]`` gives its weights; several
    agents of one role are named ``role/0``, ``role/1``."""


class EpisodePolicy:
    """The model under training, as a rollout sees it, for one episode.

    Several answers may be requested at once (``asyncio.gather``), in any number of conversations. Messages that
    continue an earlier conversation are read after its tokens, as they were sampled; other messages begin a branch of
    their own.
    """

    def __init__(
        self,
        episode: Answering,
        *,
        prompt_ids: Sequence[int] = (),
        attempt_kind: AttemptKind = AttemptKind.ALONE,
        variables: Mapping[str, str] | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Make the policy of ``episode``. Plain tool functions run in threads of ``executor``; ``None``: in those of
        the event loop."""
        self._episode = episode
        self._executor = executor
        self._functions: dict[Callable[..., Any], ToolFunction | DescribedTool] = {}
        self.seed = episode.seed
        """A seed for draws of the rollout. It differs between the episodes of a run, and is the same in a
        repetition."""
        self.attempt_kind = attempt_kind
        """Whether branches may leave this episode later, or it is a branch of an earlier one with the same seed."""
        self.prompt_ids = tuple(prompt_ids)
        """The tokens of the row's prompt, chat template applied; empty where rows have none."""
        self.variables = dict(variables or {})
        """Environment variables for programs that this episode starts; clients of OpenAI and Anthropic find the episode
        by them."""

    @property
    def base_url(self) -> str:
        """The URL at which clients of OpenAI's and of Anthropic's protocol reach this episode."""
        return self._variable("ANTHROPIC_BASE_URL")

    @property
    def api_key(self) -> str:
        """The key of this episode at that URL."""
        return self._variable("ANTHROPIC_API_KEY")

    def _variable(self, name: str) -> str:
        """Return a variable of the episode's endpoint. Raises :class:`~headrace.base.errors.EpisodeError` if the
        episode has none."""
        if name not in self.variables:
            raise EpisodeError(
                "this episode cannot be reached over HTTP", remedy="set env.kind = 'rollout' or 'program'"
            )
        return self.variables[name]

    async def chat(self, messages: Messages, *, tools: Tools = (), **options: Unpack[Options]) -> Reply:
        """Return the model's answer to ``messages``, in which it may call ``tools``. Append ``reply.message`` unchanged
        to the messages to continue.

        Raises :class:`~headrace.base.errors.BudgetSpent` if a budget of the episode is spent, and
        :class:`~headrace.base.errors.RequestError` for a request that the engine cannot serve.
        """
        offered = [tool if isinstance(tool, Tool) else self._function(tool).tool for tool in tools]
        return await self._episode.reply(as_messages(messages), offered, _as_options(options))

    async def sample(self, ids: Sequence[int], **options: Unpack[Options]) -> Reply:
        """Return the model's answer to these tokens, which are its whole input."""
        return await self._episode.sample(np.asarray(ids, np.int32), _as_options(options))

    async def call_tools(self, message: Message, tools: Sequence[Callable[..., Any]]) -> list[Message]:
        """Call the functions that ``message`` calls, and return their answers, to be appended to the messages. Plain
        functions run in a thread; the error of a function is its answer."""
        functions = {made.tool.name: made for made in map(self._function, tools)}
        return await call_tools(message, functions, self._executor)

    def _function(self, function: Callable[..., Any]) -> ToolFunction | DescribedTool:
        """Return the described tool of a function, which is made once per episode."""
        if function not in self._functions:
            self._functions[function] = described(function)
        return self._functions[function]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rollout, in place of a number."""

    reward: float | None = None
    """The reward of the episode; ``None``: the run's reward function decides."""
    rewards: Mapping[int, float] = {}
    """The shares of the reward that single answers earned, by ``reply.turn``."""
    agent_rewards: Mapping[str, float] = {}
    """The reward of each agent, by name. Then the answers of an agent are credited with its own reward only, compared
    with the agents of its role in the group. ``reward`` is used for metrics and filters; unset, it is the mean over
    agents whose answers carry loss."""
    trained: Sequence[Reply] | None = None
    """The answers that carry loss (the others do not, with the reason ``not_chosen``); ``None``: all of them."""
    extra: Mapping[int, Mapping[str, str | float]] = {}
    """Columns about single answers that are shown with the episode, by ``reply.turn``. Where a program asks for the
    answers and the rollout sees none, :data:`~headrace.rollout.environments.base.LAST` names the last one."""


def _as_options(options: Mapping[str, Any]) -> ChatOptions:
    """Return options of an answer as a record. Raises :class:`~headrace.base.errors.EpisodeError` for unknown ones."""
    try:
        return msgspec.convert(dict(options), ChatOptions)
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"options of an answer: {error}", remedy="look at headrace.rollout.environments.policy.Options"
        ) from None


Policy = EpisodePolicy
"""An alias for type annotations of the user's rollouts."""
