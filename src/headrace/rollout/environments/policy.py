"""The policy under training as user code uses it: :class:`EpisodePolicy`, the options of an answer, and the result of a
rollout."""

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
from headrace.rollout.environments.tools import DescribedTool, ToolFunction, as_tool, call_tools

Tools = Sequence[Tool | Callable[..., Any]]
"""The tools that the model may call: functions with types and docstrings, or descriptions alone."""


class Options(TypedDict, total=False):
    """The options of one answer. An option that is not given has the value of the run."""

    max_new_tokens: int
    """The largest number of tokens of the answer, at most ``engine.max_new_tokens``."""
    temperature: float
    """The sampling temperature. An answer sampled with other parameters than the run's carries no loss
    (``other_sampling``)."""
    top_p: float
    """The top-p limit; see ``temperature``."""
    top_k: int
    """The top-k limit; see ``temperature``."""
    stop: Sequence[str]
    """Strings that end the answer. The first stop string that appears ends the answer and is not part of its
    content."""
    agent: str
    """The name of the agent that answers. It becomes the author of the turn, and ``[[env.agents]]`` defines its
    weights. Several agents of one role are named ``role/0``, ``role/1``."""


class EpisodePolicy:
    """The model under training as a rollout uses it, for one episode.

    Several answers may be requested at once (``asyncio.gather``), in any number of conversations. Messages that
    continue an earlier conversation are appended to the tokens that were sampled in it. Other messages begin a new
    branch.
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
        """Create the policy of ``episode``. Plain tool functions run in threads of ``executor``; ``None`` means the
        default executor of the event loop. The other arguments become attributes."""
        self._episode = episode
        self._executor = executor
        self._tools: dict[Callable[..., Any], ToolFunction | DescribedTool] = {}
        """The tools that were created so far, by their functions."""
        self.seed = episode.seed
        """A seed for random draws of the rollout. It differs between the episodes of a run, and is the same when the
        run is repeated."""
        self.attempt_kind = attempt_kind
        """Whether the episode stands alone, may have branches later, or is a branch of an earlier episode with the same
        seed."""
        self.prompt_ids = tuple(prompt_ids)
        """The token ids of the row's prompt, with the chat template applied; empty if the rows have no prompts."""
        self.variables = dict(variables or {})
        """Environment variables for programs that this episode starts. OpenAI's and Anthropic's clients read the
        address and the key of the episode from them."""

    @property
    def base_url(self) -> str:
        """The URL at which clients of OpenAI's and of Anthropic's protocol reach this episode."""
        return self._get_variable("ANTHROPIC_BASE_URL")

    @property
    def api_key(self) -> str:
        """The key that authorizes requests to this episode at :attr:`base_url`."""
        return self._get_variable("ANTHROPIC_API_KEY")

    def _get_variable(self, name: str) -> str:
        """Return the variable ``name`` of the episode's HTTP endpoint. Raises
        :class:`~headrace.base.errors.EpisodeError` if the episode has no endpoint."""
        if name not in self.variables:
            raise EpisodeError(
                "this episode cannot be reached over HTTP", remedy="set env.kind = 'rollout' or 'program'"
            )
        return self.variables[name]

    async def chat(self, messages: Messages, *, tools: Tools = (), **options: Unpack[Options]) -> Reply:
        """Return the model's answer to ``messages``. The answer may call ``tools``. To continue the conversation,
        append ``reply.message`` unchanged to the messages.

        Raises :class:`~headrace.base.errors.BudgetSpent` if a budget of the episode is spent, and
        :class:`~headrace.base.errors.RequestError` for a request that the engine cannot serve.
        """
        descriptions = [tool if isinstance(tool, Tool) else self._get_tool(tool).tool for tool in tools]
        return await self._episode.reply(as_messages(messages), descriptions, _as_options(options))

    async def sample(self, ids: Sequence[int], **options: Unpack[Options]) -> Reply:
        """Return the model's answer to the token ids ``ids``, the complete input of the model."""
        return await self._episode.sample(np.asarray(ids, np.int32), _as_options(options))

    async def call_tools(self, message: Message, tools: Sequence[Callable[..., Any]]) -> list[Message]:
        """Call the functions that ``message`` calls, which must be among ``tools``, and return their answers as
        messages to append. Plain functions run in a thread. If a function raises an error, the error text is its
        answer."""
        tools_by_name = {tool.tool.name: tool for tool in map(self._get_tool, tools)}
        return await call_tools(message, tools_by_name, self._executor)

    def _get_tool(self, function: Callable[..., Any]) -> ToolFunction | DescribedTool:
        """Return the tool with the description of ``function``. It is created once per episode and then cached."""
        if function not in self._tools:
            self._tools[function] = as_tool(function)
        return self._tools[function]


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rollout with details, which a rollout may return in place of a number."""

    reward: float | None = None
    """The reward of the episode; ``None`` if the run's reward function computes it."""
    rewards: Mapping[int, float] = {}
    """The part of the reward that an answer earned, by ``reply.turn``."""
    agent_rewards: Mapping[str, float] = {}
    """The reward of each agent, by agent name. If set, the answers of an agent are credited only with the agent's own
    reward, compared with the agents of the same role in the group. ``reward`` is then used for metrics and filters
    only; if it is unset, it is the mean over the agents whose answers carry loss."""
    trained: Sequence[Reply] | None = None
    """The answers that carry loss; ``None`` means all of them. All other answers carry no loss, for the reason
    ``not_chosen``."""
    extra: Mapping[int, Mapping[str, str | float]] = {}
    """Columns about an answer that are shown with the episode, by ``reply.turn``. If a program requests the answers and
    the rollout receives no reply, use :data:`~headrace.rollout.environments.base.LAST` for the last answer."""


def _as_options(options: Mapping[str, Any]) -> ChatOptions:
    """Return the options of an answer as a record. Raises :class:`~headrace.base.errors.EpisodeError` for unknown
    options."""
    try:
        return msgspec.convert(dict(options), ChatOptions)
    except msgspec.ValidationError as error:
        raise EpisodeError(
            f"options of an answer: {error}", remedy="look at headrace.rollout.environments.policy.Options"
        ) from None


Policy = EpisodePolicy
"""An alias for type annotations of the user's rollouts."""
