"""The conversations of one episode: what a list of messages continues, and the answer to it.

    messages ─▶ the longest path whose messages begin the list ─▶ what comes after it, rendered: a turn below
                                                                         │
    reply ◀── read as a message ◀── a turn below that, as it was sampled ◀── engine

A list that was edited, cut or compacted shares a shorter path, and branches there. One of which nothing is held starts
a root of its own. Whoever asks the same twice, or two things at once, gets answers beside each other.
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
from headrace.base.types.episode import EpisodeKey, Turn, TurnPart
from headrace.base.types.sampling import Sampling
from headrace.base.types.tokens import IntColumn, Tokens
from headrace.rollout.chat import Chat, Read, Reading
from headrace.rollout.environments.base import AS_THE_RUN, Hear
from headrace.rollout.growing import Growing
from headrace.rollout.history import History, HistoryNode, num_chars

OTHER_SAMPLING = "other_sampling"
"""Why a turn carries no loss that was sampled otherwise than the run samples."""
LONG_CHARS = 1 << 16
"""As much text is written as tokens in a few hundredths of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What one episode may have; ``None``: as much as it likes."""

    max_context: int | None = None
    """Tokens of a path, its last answer included."""
    max_turns: int | None = None
    """Answers."""
    max_tokens: int | None = None
    """Sampled, in all answers together."""
    max_tool_calls: int | None = None
    """Calls of tools, in all answers together."""


UNLIMITED = EpisodeLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A turn that is to be sampled."""

    prompt_ids_T: IntColumn
    """Everything that the model is to read."""
    parent: int
    """The turn that it continues."""
    author: str
    sampling: Sampling
    untrained: str = ""
    """Why it will carry no loss; empty where it does."""
    hear: Callable[[TurnPart], None] | None = None
    """Told of it as it grows; ``None``: nobody is."""


class TurnSampler(Protocol):
    """Samples turns, and holds all turns of the episode."""

    key: EpisodeKey
    sampling: Sampling
    """How the run samples."""
    turns: list[Turn]

    async def sample(self, wanted: TurnRequest) -> int:
        """Sample a turn and append it; its index. Where this raises, what had come of it is appended."""
        ...

    def begin_again(self) -> None:
        """Forget all turns: what is asked again is answered with what was sampled."""
        ...


class Conversations:
    """The :class:`~headrace.rollout.environments.base.OpenEpisode` of one attempt. Without a ``chat`` it speaks in
    tokens only; ``note``
    is told, in words that can be counted, what is odd and no error."""

    def __init__(
        self, sampler: TurnSampler, limits: EpisodeLimits, *, chat: Chat | None, seed: int, note: Callable[[str], None]
    ) -> None:
        self.key = sampler.key
        self.seed = seed
        self._sampler = sampler
        self._limits = limits
        self._chat = chat
        self._note = note
        self._begin()

    def _begin(self) -> None:
        self._history = History(self._sampler.turns)
        self._num_asked = 0
        self._num_tokens = 0
        self._num_calls = 0

    def begin_again(self) -> None:
        """See :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        self._sampler.begin_again()
        self._begin()

    @property
    def turns(self) -> list[Turn]:
        """All of them, parents before children."""
        return self._sampler.turns

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: ChatOptions = AS_THE_RUN,
        hear: Hear | None = None,
    ) -> Reply:
        """The model's answer to ``messages``; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        if not messages:
            raise EpisodeError("asked for an answer to no message", remedy="send at least one")
        held = self._history.find_messages(messages, tools, options.agent)
        below = held.node
        if below is None or below.sampled:  # else the question itself is held
            new = messages[held.length :]
            ids = await self._rendered(below, new, tools)
            self._refuse_spent(below, len(ids))
            turn = Turn(
                author=_author(new, first=below is None),
                tokens=Tokens.observed(ids),
                parent=None if below is None else below.turn,
                failed=any(message.failed for message in new),
            )
            below = self._history.add_given(turn, below, new, tools)
        return await self._answer(below, options, calls=len(tools) > 0, hear=hear)

    async def sample(self, prompt_ids_T: IntColumn, options: ChatOptions = AS_THE_RUN) -> Reply:
        """The model's answer to these tokens; see :class:`~headrace.rollout.environments.base.OpenEpisode`."""
        ids_T = np.ascontiguousarray(prompt_ids_T, np.int32)
        if ids_T.ndim != 1 or not len(ids_T):
            raise EpisodeError(f"a prompt of shape {ids_T.shape}", remedy="give a list of token ids")
        held = self._history.find_tokens(ids_T)
        below = held.node
        if below is None or held.length < len(ids_T):
            self._refuse_spent(below, len(ids_T) - held.length)
            turn = Turn(
                author="task" if below is None else "user",
                tokens=Tokens.observed(ids_T[held.length :]),
                parent=None if below is None else below.turn,
            )
            below = self._history.add_given(turn, below, None)
        return await self._answer(below, options, calls=False)

    async def count(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """How many tokens the model would read; nothing is sampled, and nothing is kept."""
        held = self._history.find_messages(messages, tools)
        new = 0
        if held.node is None or held.node.sampled:
            new = len(await self._rendered(held.node, messages[held.length :], tools))
        return new + sum(map(len, self._history.path_ids(held.node)))

    def spell(self, token: int) -> str:
        """A token as text, a special one too."""
        return "" if self._chat is None else self._chat.tokenizer.decode([token], skip_special_tokens=False)

    async def _rendered(self, below: HistoryNode | None, new: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The tokens of what is not held. What could never fit is not tokenised, and what is long keeps nobody else
        waiting."""
        if self._chat is None or self._chat.renderer is None:
            raise EpisodeError(
                "chat messages, but the model's tokenizer has no chat template",
                remedy="use a chat model, add a chat_template.jinja to the model directory, or sample token ids",
                reason="template_error",
            )
        length = num_chars(new, tools if below is None else ())
        most = self._limits.max_context
        if most is not None and length > most * self._chat.longest_token:
            raise self._spent("max_context", "engine.max_context", f"messages of {length} characters")
        if below is None:
            render = partial(self._chat.renderer.opening, new, tools)
        else:
            answer_ids = self.turns[below.turn].tokens.ids_T.tolist()
            render = partial(self._chat.renderer.continuation, new, tools, answer_ids)
        return render() if length < LONG_CHARS else await off_loop(render)

    async def _answer(
        self, below: HistoryNode, options: ChatOptions, *, calls: bool, hear: Hear | None = None
    ) -> Reply:
        """Sample a turn below, and read it."""
        self._refuse_spent(below, 0)
        prompt_ids_T = np.concatenate(list(self._history.path_ids(below)))
        sampling = self._sampling(options, len(prompt_ids_T))
        opened = self._chat is not None and self._chat.opens_thought(prompt_ids_T)
        how = Reading(stop=options.stop, calls=calls, opened=opened)
        growing = None
        if hear is not None and self._chat is not None:
            growing = Growing(self._chat, how, hear, num_prompt_tokens=len(prompt_ids_T))
        wanted = TurnRequest(
            prompt_ids_T=prompt_ids_T,
            parent=below.turn,
            author=options.agent,
            sampling=sampling,
            untrained="" if _law(sampling) == _law(self._sampler.sampling) else OTHER_SAMPLING,
            hear=None if growing is None else growing.push,
        )
        self._num_asked += 1
        self._num_tokens += sampling.max_new_tokens  # until it is known how many it took
        try:
            index = await self._sampler.sample(wanted)
        finally:
            self._num_tokens -= sampling.max_new_tokens
        turn = self.turns[index]
        self._num_tokens += len(turn.tokens)
        read = self._read(index, how)
        self._history.add_sampled(index, below, read.message)
        if growing is not None:
            growing.end(read.message)
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

    def _read(self, index: int, how: Reading) -> Read:
        if self._chat is None:
            return Read(message=Message(role="assistant"))
        answer = self._chat.read(index, self.turns[index].tokens.ids_T.tolist(), how)
        for problem in answer.problems:
            self._note(f"an answer holds {problem}: it is taken as text")
        self._num_calls += len(answer.message.tool_calls)
        return answer

    def _sampling(self, options: ChatOptions, length: int) -> Sampling:
        """As the run samples, but for what was asked for, and for what may still be had."""
        usual, limits = self._sampler.sampling, self._limits
        room = usual.max_new_tokens
        if limits.max_context is not None:
            room = min(room, limits.max_context - length)
        if options.max_new_tokens is not None:
            room = min(room, max(1, options.max_new_tokens))
        if limits.max_tokens is not None:
            room = min(room, limits.max_tokens - self._num_tokens)
        asked = {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        return msgspec.structs.replace(
            usual,
            max_new_tokens=room,
            stop=(*usual.stop, *options.stop),
            **{name: value for name, value in asked.items() if value is not None},
        )

    def _refuse_spent(self, at: HistoryNode | None, num_new: int) -> None:
        """Raise :class:`BudgetSpent` where nothing may be sampled behind ``num_new`` tokens more than those up to
        ``at``."""
        limits = self._limits
        length = num_new + sum(map(len, self._history.path_ids(at)))
        calls = None if limits.max_tool_calls is None else limits.max_tool_calls + 1
        budgets = (
            ("max_turns", self._num_asked, limits.max_turns, "env.max_turns"),
            ("max_tokens", self._num_tokens, limits.max_tokens, "env.max_tokens"),
            ("max_tool_calls", self._num_calls, calls, "env.max_tool_calls"),
            ("max_context", length, limits.max_context, "engine.max_context"),
        )
        for reason, used, most, setting in budgets:
            if most is not None and used >= most:
                raise self._spent(reason, setting, f"it is at {used}")

    def _spent(self, reason: str, setting: str, words: str) -> BudgetSpent:
        self._note(f"an episode has used up {setting}")
        problem = f"the episode has used up {setting}: {words}"
        return BudgetSpent(problem, remedy=f"end it before, or raise {setting}", reason=reason)


def _law(sampling: Sampling) -> tuple[float, float, int]:
    """What decides how likely a token is."""
    return sampling.temperature, sampling.top_p, sampling.top_k


def _author(messages: Sequence[Message], *, first: bool) -> str:
    """Who wrote a turn that was not sampled."""
    if first:
        return "task"
    return "tool" if messages and all(message.role == "tool" for message in messages) else "user"
