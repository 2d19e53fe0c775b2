"""The messages of one model: written as tokens, and read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from headrace.base.types.chat import Message, ToolCall
from headrace.base.types.tokens import IntColumn
from headrace.rollout.answers import Parser, parser_for, split_reasoning
from headrace.rollout.answers.base import THINK, ParsedAnswer
from headrace.rollout.rendering import Renderer, Tokenizer

_TAIL = 16
"""Tokens at the end of a prompt among which the beginning of a thought, and the space behind it, are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How an answer is to be read."""

    stop: Sequence[str] = ()
    """Strings that end it, and are no part of it."""
    calls: bool = False
    """Whether there are tools that it could call."""
    opened: bool = False
    """Whether the prompt has begun a thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """An answer, read."""

    message: Message
    stop: str = ""
    """The stop string that ended it; empty where none did."""
    problems: tuple[str, ...] = ()
    """What looked like a call and is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What writes and reads the messages of one model."""

    tokenizer: Tokenizer
    renderer: Renderer | None
    """``None`` for a model without a chat template: it reads tokens only."""
    parser: Parser
    """Finds the calls of tools in an answer."""
    stop_ids: frozenset[int]
    """Any of these ends an answer, and is no part of what is said."""
    hidden_ids: frozenset[int]
    """Special tokens that are no part of what is said."""
    longest_token: int
    """Characters of it: how much text a context can hold at the most."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, stop_ids: Sequence[int], parser: str = "auto") -> Self:
        """For the model of ``tokenizer``; ``parser`` is a name of ``env.tool_parser``."""
        template = tokenizer.chat_template
        chosen = parser_for(parser, template or "")
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in chosen.markers}
        return cls(
            tokenizer=tokenizer,
            renderer=None if template is None else Renderer(tokenizer, stop_ids),
            parser=chosen,
            stop_ids=frozenset(stop_ids),
            hidden_ids=frozenset(tokenizer.all_special_ids) - shown,
            longest_token=max(map(len, tokenizer.get_vocab())),
        )

    def opens_thought(self, prompt_ids_T: IntColumn) -> bool:
        """Whether the model reads the beginning of a thought as the last of its prompt."""
        return _opens_thought(self.tokenizer, tuple(prompt_ids_T[-_TAIL:].tolist()))

    def read(self, turn: int, ids: Sequence[int], how: Reading) -> Read:
        """The message that the sampled tokens of ``turn`` are."""
        last = len(ids) - 1
        said = [token for place, token in enumerate(ids) if token not in self.hidden_ids]
        if ids and ids[last] in self.stop_ids and said and said[-1] == ids[last]:
            said.pop()
        text = self.tokenizer.decode(said, skip_special_tokens=False)
        cut, ended_by = min(
            ((place, string) for string in how.stop if (place := text.find(string)) >= 0), default=(None, "")
        )
        reasoning, rest = split_reasoning(text[:cut], opened=how.opened)
        answer = self.parser(rest) if how.calls else ParsedAnswer(content=rest)
        made = tuple(
            ToolCall(id=f"call_{turn}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(answer.calls)
        )
        message = Message(role="assistant", content=answer.content, reasoning=reasoning, tool_calls=made)
        return Read(message=message, stop=ended_by, problems=answer.problems)


@lru_cache(maxsize=4096)  # siblings begin alike
def _opens_thought(tokenizer: Tokenizer, tail: tuple[int, ...]) -> bool:
    return tokenizer.decode(list(tail), skip_special_tokens=False).rstrip().endswith(THINK)
