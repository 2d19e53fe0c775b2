"""The conversations of one episode: this module finds the earlier turns that a list of messages continues, and samples
the answer to it.

    messages ─▶ the longest path whose messages begin the list ─▶ the messages after it, rendered: a new turn
                                                                         │
    reply ◀── read as a message ◀── the next turn, as it was sampled ◀── engine

The turns of an episode form a tree, and a *path* leads from a root to a turn. A list of messages that was edited, cut
or compacted shares only the beginning of a path, and a new branch starts there. A list that shares no beginning starts
a new root. Two equal requests get two answers, which are siblings in the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from headrace.base.clock import off_loop
from headrace.base.errors import BudgetSpent, EpisodeError
from headrace.base.types.chat import ChatOptions, Message, Reply, Tool
from headrace.base.types.episode import AttemptKind, EpisodeKey, TokenChunk, Turn
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.rollout.chat import Chat, ReadAnswer, Reading
from headrace.rollout.environments.base import AS_THE_RUN, OnPiece
from headrace.rollout.history import History, HistoryNode, num_chars
from headrace.rollout.streaming import AnswerStream

OTHER_SAMPLING = "other_sampling"
"""The reason why a turn sampled with other parameters than the run's carries no loss."""
LONG_CHARS = 1 << 16
"""The number of characters from which messages are rendered and tokenised in a thread, because this takes some
hundredths of a second and would block the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The budgets of one episode. ``None`` means unlimited."""

    max_context: int | None = None
    """The largest number of tokens of a path, including its last answer."""
    max_turns: int | None = None
    """The largest number of answers."""
    max_tokens: int | None = None
    """The largest number of sampled tokens, summed over all answers."""
    max_tool_calls: int | None = None
    """The largest number of tool calls, summed over all answers."""


UNLIMITED = EpisodeLimits()
"""The budgets of an episode without any limit."""


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to sample one turn. :class:`Conversations` creates it, and a :class:`TurnSampler` carries it out."""

    prompt_ids_T: IntColumn
    """The ids of all tokens that the model reads before the turn."""
    digest: str
    """The digest of ``prompt_ids_T``, as :func:`~headrace.rollout.history.prompt_digest` returns it."""
    parent: int
    """The index of the turn that the new turn continues."""
    author: str
    """The name of the agent that samples the turn."""
    sampling: Sampling
    """The sampling parameters of this turn."""
    untrained: str = ""
    """The reason why the turn will carry no loss; empty if it will carry loss."""
    on_chunk: Callable[[TokenChunk], None] | None = None
    """A callback for each chunk of the turn as it arrives; ``None`` if no callback is needed."""


class TurnSampler(Protocol):
    """An object that samples turns and stores all turns of the episode. :class:`~headrace.rollout.runner.EnginePolicy`
    implements it."""

    key: EpisodeKey
    """The group and the number of the episode."""
    turns: list[Turn]
    """The turns so far, parents before children."""

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters of the run."""

    async def sample(self, request: TurnRequest) -> int:
        """Sample a turn, append it to ``turns``, and return its index. If this raises an error, the tokens sampled so
        far have been appended as an unfinished turn."""

    def restart(self) -> None:
        """Discard all turns. If a turn is requested again later, its recorded tokens are used instead of new ones."""


class Conversations:
    """The :class:`~headrace.rollout.environments.base.OpenEpisode` of one attempt: it answers the messages of the
    environment and keeps the turns in a tree.

    Without a ``chat``, the environment can only use token ids. ``seed`` is the seed for the environment's own random
    draws. ``note`` receives a short description of each event that is unusual but not an error; equal descriptions are
    counted.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        limits: EpisodeLimits,
        *,
        chat: Chat | None,
        seed: int,
        note: Callable[[str], None],
        attempt_kind: AttemptKind = AttemptKind.ALONE,
    ) -> None:
        """Create the conversations of an episode without turns. ``sampler`` samples the turns, within the budgets
        ``limits``. ``chat`` is ``None`` for a model that accepts token ids only. ``attempt_kind`` says whether the
        episode stands alone, may have branches, or is a branch itself."""
        self.key = sampler.key
        self.seed = seed
        self.attempt_kind = attempt_kind
        self._sampler = sampler
        self._limits = limits
        self._chat = chat
        self._note = note
        self._clear()

    def _clear(self) -> None:
        """Set the history and all counters to their values at the start of an episode."""
        self._history = History(self._sampler.turns)
        self._num_turns = 0
        """The number of sampled turns, the running one included."""
        self._num_tokens = 0
        """The number of sampled tokens, with the tokens that are reserved for running turns."""
        self._num_calls = 0
        """The number of tool calls in all answers."""

    def restart(self) -> None:
        """Discard all turns; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        self._sampler.restart()
        self._clear()

    @property
    def turns(self) -> list[Turn]:
        """All turns of the episode, parents before children."""
        return self._sampler.turns

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Return the model's answer to ``messages``; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        if not messages:
            raise EpisodeError("asked for an answer to no message", remedy="send at least one")
        prefix = self._history.find_messages(messages, tools, options.agent)
        parent = prefix.node
        if parent is None or parent.sampled:  # otherwise the history contains exactly these messages already
            new_messages = messages[prefix.length :]
            ids = await self._render(parent, new_messages, tools)
            self._refuse_if_spent(parent, len(ids))
            turn = Turn(
                author=_author(new_messages, first=parent is None),
                tokens=Tokens.observed(ids),
                parent=None if parent is None else parent.turn,
                failed=any(message.failed for message in new_messages),
            )
            parent = self._history.add_given(turn, parent, new_messages, tools)
        return await self._answer(parent, self._history.ids(parent), options, calls=len(tools) > 0, on_piece=on_piece)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the model's answer to these tokens; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        ids_T = np.ascontiguousarray(prompt_ids_T, np.int32)
        if ids_T.ndim != 1 or not len(ids_T):
            raise EpisodeError(f"a prompt of shape {ids_T.shape}", remedy="give a list of token ids")
        prefix = self._history.find_tokens(ids_T)
        parent = prefix.node
        if parent is None or prefix.length < len(ids_T):
            self._refuse_if_spent(parent, len(ids_T) - prefix.length)
            turn = Turn(
                author="task" if parent is None else "user",
                tokens=Tokens.observed(ids_T[prefix.length :]),
                parent=None if parent is None else parent.turn,
            )
            parent = self._history.add_given(turn, parent, None)
        return await self._answer(parent, ids_T, options)

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return how many tokens the model would read for ``messages`` if ``tools`` are offered. This method samples
        and stores nothing."""
        prefix = self._history.find_messages(messages, tools)
        num_new = 0
        if prefix.node is None or prefix.node.sampled:
            num_new = len(await self._render(prefix.node, messages[prefix.length :], tools))
        return num_new + (0 if prefix.node is None else prefix.node.length)

    def spell(self, token: int) -> str:
        """Return the text of a token, including special tokens. Without a chat there is no tokenizer, and the result is
        empty."""
        return "" if self._chat is None else self._chat.tokenizer.decode([token], skip_special_tokens=False)

    async def _render(
        self, parent: HistoryNode | None, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int]:
        """Return the token ids of the new ``messages``. They continue the turn ``parent``, or begin a conversation that
        offers ``tools`` if ``parent`` is ``None``. Messages that can never fit into the context are refused before they
        are tokenised; long messages are tokenised in a thread."""
        if self._chat is None or self._chat.renderer is None:
            raise EpisodeError(
                "chat messages, but the model's tokenizer has no chat template",
                remedy="use a chat model, add a chat_template.jinja to the model directory, or sample token ids",
                reason="template_error",
            )
        length = num_chars(messages, tools if parent is None else ())
        max_context = self._limits.max_context
        if max_context is not None and length > max_context * self._chat.longest_token:
            raise self._spent_error("max_context", "engine.max_context", f"messages of {length} characters")
        if parent is None:
            render = partial(self._chat.renderer.opening, messages, tools)
        else:
            answer_ids = self.turns[parent.turn].tokens.ids_T.tolist()
            render = partial(self._chat.renderer.continuation, messages, tools, answer_ids)
        return render() if length < LONG_CHARS else await off_loop(render)

    async def _answer(
        self,
        parent: HistoryNode,
        prompt_ids_T: IntColumn,
        options: ChatOptions,
        *,
        calls: bool = False,
        on_piece: OnPiece | None = None,
    ) -> Reply:
        """Sample a turn after ``parent`` and return it as a reply. ``prompt_ids_T`` are the tokens from the root up to
        the end of ``parent``. ``options`` change the sampling parameters of the run. ``calls`` says whether tools were
        offered, in which case the answer is searched for tool calls. ``on_piece`` receives the pieces of the answer
        while it is sampled."""
        self._refuse_if_spent(parent, 0)
        sampling = self._make_sampling(options, len(prompt_ids_T))
        opened = self._chat is not None and self._chat.opens_thought(prompt_ids_T)
        reading = Reading(stop=options.stop, calls=calls, opened=opened)
        stream = None
        if on_piece is not None and self._chat is not None:
            stream = AnswerStream(self._chat, reading, on_piece, num_prompt_tokens=len(prompt_ids_T))
        has_run_distribution = _distribution_key(sampling) == _distribution_key(self._sampler.sampling)
        request = TurnRequest(
            prompt_ids_T=prompt_ids_T,
            digest=parent.hashed.hexdigest(),
            parent=parent.turn,
            author=options.agent,
            sampling=sampling,
            untrained="" if has_run_distribution else OTHER_SAMPLING,
            on_chunk=None if stream is None else stream.push,
        )
        self._num_turns += 1
        self._num_tokens += sampling.max_new_tokens  # reserved until the real number is known
        try:
            index = await self._sampler.sample(request)
        finally:
            self._num_tokens -= sampling.max_new_tokens
        turn = self.turns[index]
        self._num_tokens += len(turn.tokens)
        read = self._read(index, reading)
        self._history.add_sampled(index, parent, read.message)
        if stream is not None:
            stream.end(read.message)
        assert turn.stop_reason is not None
        return Reply(
            message=read.message,
            stop=read.stop,
            turn=index,
            stop_reason=turn.stop_reason,
            num_prompt_tokens=len(prompt_ids_T),
            num_tokens=len(turn.tokens),
            logprobs=tuple(turn.tokens.logprobs_T.tolist()),
            token_ids=tuple(turn.tokens.ids_T.tolist()),
        )

    def _read(self, index: int, reading: Reading) -> ReadAnswer:
        """Return the message that the sampled turn ``index`` represents, add its tool calls to the count, and note its
        invalid calls. ``reading`` are the options for reading the tokens."""
        if self._chat is None:
            return ReadAnswer(message=Message(role="assistant"))
        answer = self._chat.read(index, self.turns[index].tokens.ids_T.tolist(), reading)
        for problem in answer.problems:
            self._note(f"an answer holds {problem}: it is taken as text")
        self._num_calls += len(answer.message.tool_calls)
        return answer

    def _make_sampling(self, options: ChatOptions, length: int) -> Sampling:
        """Return the sampling parameters for the next turn: the run's parameters, with the changes of ``options``, and
        a ``max_new_tokens`` that fits into the remaining budgets. ``length`` is the number of tokens that the model
        reads before the answer."""
        defaults, limits = self._sampler.sampling, self._limits
        max_new_tokens = defaults.max_new_tokens
        if limits.max_context is not None:
            max_new_tokens = min(max_new_tokens, limits.max_context - length)
        if options.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, max(1, options.max_new_tokens))
        if limits.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, limits.max_tokens - self._num_tokens)
        overrides = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        return msgspec.structs.replace(
            defaults,
            max_new_tokens=max_new_tokens,
            stop=(*defaults.stop, *options.stop),
            **{name: value for name, value in overrides.items() if value is not None},
        )

    def _refuse_if_spent(self, parent: HistoryNode | None, num_new: int) -> None:
        """Raise :class:`BudgetSpent` if a budget of the episode leaves no token to sample after the path up to
        ``parent`` and ``num_new`` further tokens."""
        limits = self._limits
        length = num_new + (0 if parent is None else parent.length)
        # the answer after the last allowed call is still sampled, so only one call more ends the episode
        calls = None if limits.max_tool_calls is None else limits.max_tool_calls + 1
        budgets = (
            ("max_turns", self._num_turns, limits.max_turns, "env.max_turns"),
            ("max_tokens", self._num_tokens, limits.max_tokens, "env.max_tokens"),
            ("max_tool_calls", self._num_calls, calls, "env.max_tool_calls"),
            ("max_context", length, limits.max_context, "engine.max_context"),
        )
        for reason, used, limit, setting in budgets:
            if limit is not None and used >= limit:
                raise self._spent_error(reason, setting, f"it is at {used}")

    def _spent_error(self, reason: str, setting: str, detail: str) -> BudgetSpent:
        """Return the error for a budget that is used up, and note the event. ``reason`` is the reason in the episode's
        record, ``setting`` is the name of the budget's setting, and ``detail`` says how much was used."""
        self._note(f"an episode has used up {setting}")
        problem = f"the episode has used up {setting}: {detail}"
        return BudgetSpent(problem, remedy=f"end it before, or raise {setting}", reason=reason)


def _distribution_key(sampling: Sampling) -> tuple[float, float, int]:
    """Return the parameters that determine the probability of a token: temperature, top-p and top-k. A turn whose
    parameters differ from the run's carries no loss."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _author(messages: Sequence[Message], *, first: bool) -> str:
    """Return the author of a turn that the policy did not sample: the task if the turn is the ``first`` of its
    conversation, a tool if all its messages are results of tools, and the user otherwise."""
    if first:
        return "task"
    return "tool" if messages and all(message.role == "tool" for message in messages) else "user"
