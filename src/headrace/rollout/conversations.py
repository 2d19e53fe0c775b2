"""The conversations of one episode: how a list of messages continues earlier ones, and the answer to it.

    messages ─▶ the longest path whose messages begin the list ─▶ the messages after it, rendered: a new turn
                                                                         │
    reply ◀── read as a message ◀── the next turn, as it was sampled ◀── engine

A list that was edited, cut or compacted shares a shorter path, and branches there. A list without a common beginning
starts a new root. The same request made twice, or two requests at once, get sibling answers.
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
"""The number of characters from which messages are rendered and tokenised in a thread: it takes some hundredths of a
second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The budgets of one episode; ``None``: unlimited."""

    max_context: int | None = None
    """The most tokens of a path, its last answer included."""
    max_turns: int | None = None
    """The most answers."""
    max_tokens: int | None = None
    """The most sampled tokens, over all answers."""
    max_tool_calls: int | None = None
    """The most calls of tools, over all answers."""


UNLIMITED = EpisodeLimits()


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to sample one turn, which :class:`Conversations` makes and a :class:`TurnSampler` carries out."""

    prompt_ids_T: IntColumn
    """All tokens that the model reads before it."""
    digest: str
    """Their digest, as :func:`~headrace.rollout.history.prompt_digest` returns it."""
    parent: int
    """The index of the turn that it continues."""
    author: str
    """The agent that samples it."""
    sampling: Sampling
    """The sampling parameters of this turn."""
    untrained: str = ""
    """The reason why it will carry no loss; empty if it will."""
    on_chunk: Callable[[TokenChunk], None] | None = None
    """Called with each chunk as it arrives; ``None``: not called."""


class TurnSampler(Protocol):
    """An object that samples turns and holds all turns of the episode; the runner of episodes implements it."""

    key: EpisodeKey
    """The group and the number of the episode."""
    sampling: Sampling
    """The sampling parameters of the run."""
    turns: list[Turn]
    """The turns so far, parents before children."""

    async def sample(self, request: TurnRequest) -> int:
        """Sample a turn, append it, and return its index. If this raises, the tokens sampled so far have been
        appended."""
        ...

    def restart(self) -> None:
        """Discard all turns. When a turn is requested again, its recorded tokens are used again."""
        ...


class Conversations:
    """The :class:`~headrace.rollout.environments.base.OpenEpisode` of one attempt: it answers the messages of the
    environment, and keeps the turns in a tree.

    Without a ``chat``, only token ids can be used. ``seed`` is for the environment's own draws. ``note`` is called with
    a short description of each event that is unusual but not an error; equal descriptions are counted.
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
        """Begin an episode without turns. ``sampler`` samples its turns, within the budgets ``limits``; ``chat`` is
        ``None`` for a model that reads token ids only."""
        self.key = sampler.key
        self.seed = seed
        self.attempt_kind = attempt_kind
        self._sampler = sampler
        self._limits = limits
        self._chat = chat
        self._note = note
        self._begin()

    def _begin(self) -> None:
        """Begin without any turn, as at the start of an episode."""
        self._history = History(self._sampler.turns)
        self._num_turns = 0
        self._num_tokens = 0
        self._num_calls = 0

    def restart(self) -> None:
        """Discard all turns; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        self._sampler.restart()
        self._begin()

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
        if parent is None or parent.sampled:  # else these very messages have been given before
            new = messages[prefix.length :]
            ids = await self._rendered(parent, new, tools)
            self._refuse_spent(parent, len(ids))
            turn = Turn(
                author=_author(new, first=parent is None),
                tokens=Tokens.observed(ids),
                parent=None if parent is None else parent.turn,
                failed=any(message.failed for message in new),
            )
            parent = self._history.add_given(turn, parent, new, tools)
        return await self._answer(parent, self._history.ids(parent), options, calls=len(tools) > 0, on_piece=on_piece)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """Return the model's answer to these tokens; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        ids_T = np.ascontiguousarray(prompt_ids_T, np.int32)
        if ids_T.ndim != 1 or not len(ids_T):
            raise EpisodeError(f"a prompt of shape {ids_T.shape}", remedy="give a list of token ids")
        prefix = self._history.find_tokens(ids_T)
        parent = prefix.node
        if parent is None or prefix.length < len(ids_T):
            self._refuse_spent(parent, len(ids_T) - prefix.length)
            turn = Turn(
                author="task" if parent is None else "user",
                tokens=Tokens.observed(ids_T[prefix.length :]),
                parent=None if parent is None else parent.turn,
            )
            parent = self._history.add_given(turn, parent, None)
        return await self._answer(parent, ids_T, options)

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Return how many tokens the model would read for these messages. Nothing is sampled or stored."""
        prefix = self._history.find_messages(messages, tools)
        new = 0
        if prefix.node is None or prefix.node.sampled:
            new = len(await self._rendered(prefix.node, messages[prefix.length :], tools))
        return new + (0 if prefix.node is None else prefix.node.length)

    def spell(self, token: int) -> str:
        """Return the text of a token, special tokens included; empty without a chat, which has the tokenizer."""
        return "" if self._chat is None else self._chat.tokenizer.decode([token], skip_special_tokens=False)

    async def _rendered(self, parent: HistoryNode | None, new: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of the messages ``new`` that continue the turn ``parent``; ``None``: that begin a
        conversation. Messages that can never fit the context are refused before they are tokenised; long ones are
        tokenised in a thread."""
        if self._chat is None or self._chat.renderer is None:
            raise EpisodeError(
                "chat messages, but the model's tokenizer has no chat template",
                remedy="use a chat model, add a chat_template.jinja to the model directory, or sample token ids",
                reason="template_error",
            )
        length = num_chars(new, tools if parent is None else ())
        most = self._limits.max_context
        if most is not None and length > most * self._chat.longest_token:
            raise self._spent("max_context", "engine.max_context", f"messages of {length} characters")
        if parent is None:
            render = partial(self._chat.renderer.opening, new, tools)
        else:
            answer_ids = self.turns[parent.turn].tokens.ids_T.tolist()
            render = partial(self._chat.renderer.continuation, new, tools, answer_ids)
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
        """Sample a turn after ``parent``, and return it as a reply. ``prompt_ids_T`` are the tokens up to the end of
        ``parent``. ``calls`` says whether tools were offered, so that calls are looked for in the answer; ``on_piece``
        is called with its pieces meanwhile."""
        self._refuse_spent(parent, 0)
        sampling = self._sampling(options, len(prompt_ids_T))
        opened = self._chat is not None and self._chat.opens_thought(prompt_ids_T)
        reading = Reading(stop=options.stop, calls=calls, opened=opened)
        stream = None
        if on_piece is not None and self._chat is not None:
            stream = AnswerStream(self._chat, reading, on_piece, num_prompt_tokens=len(prompt_ids_T))
        is_usual = _distribution_key(sampling) == _distribution_key(self._sampler.sampling)
        request = TurnRequest(
            prompt_ids_T=prompt_ids_T,
            digest=parent.hashed.hexdigest(),
            parent=parent.turn,
            author=options.agent,
            sampling=sampling,
            untrained="" if is_usual else OTHER_SAMPLING,
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
        """Return the message that the sampled turn ``index`` holds, count its calls of tools, and note its invalid
        ones. ``reading`` says how it is read."""
        if self._chat is None:
            return ReadAnswer(message=Message(role="assistant"))
        answer = self._chat.read(index, self.turns[index].tokens.ids_T.tolist(), reading)
        for problem in answer.problems:
            self._note(f"an answer holds {problem}: it is taken as text")
        self._num_calls += len(answer.message.tool_calls)
        return answer

    def _sampling(self, options: ChatOptions, length: int) -> Sampling:
        """Return the sampling parameters of the run, changed by ``options`` and by the budgets that are left.
        ``length`` is the number of tokens that the model reads before the answer."""
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

    def _refuse_spent(self, at: HistoryNode | None, num_new: int) -> None:
        """Raise :class:`BudgetSpent` if a budget of the episode leaves nothing to sample after the path up to ``at``
        and ``num_new`` further tokens."""
        limits = self._limits
        length = num_new + (0 if at is None else at.length)
        calls = None if limits.max_tool_calls is None else limits.max_tool_calls + 1
        budgets = (
            ("max_turns", self._num_turns, limits.max_turns, "env.max_turns"),
            ("max_tokens", self._num_tokens, limits.max_tokens, "env.max_tokens"),
            ("max_tool_calls", self._num_calls, calls, "env.max_tool_calls"),
            ("max_context", length, limits.max_context, "engine.max_context"),
        )
        for reason, used, most, setting in budgets:
            if most is not None and used >= most:
                raise self._spent(reason, setting, f"it is at {used}")

    def _spent(self, reason: str, setting: str, detail: str) -> BudgetSpent:
        """Return the error for a budget that is used up, and note it. ``reason`` is the reason in the episode's record,
        ``setting`` the setting of the budget, and ``detail`` how much was used."""
        self._note(f"an episode has used up {setting}")
        problem = f"the episode has used up {setting}: {detail}"
        return BudgetSpent(problem, remedy=f"end it before, or raise {setting}", reason=reason)


def _distribution_key(sampling: Sampling) -> tuple[float, float, int]:
    """Return the parameters that determine the probability of a token. Turns with other ones than the run's carry no
    loss."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _author(messages: Sequence[Message], *, first: bool) -> str:
    """Return who wrote a turn that the policy did not sample: the task, if the turn is the ``first`` of its
    conversation; a tool, if all its messages are results of tools; otherwise the user."""
    if first:
        return "task"
    return "tool" if messages and all(message.role == "tool" for message in messages) else "user"
