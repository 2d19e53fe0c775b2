"""The conversion between messages and the tokens of one model."""

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
"""The number of tokens at the end of a prompt that are searched for the beginning of a thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Options for reading the tokens of an answer as a message."""

    stop: Sequence[str] = ()
    """Strings that end it; they are not part of it."""
    calls: bool = False
    """Whether the model was offered tools to call."""
    opened: bool = False
    """Whether the prompt ends with the beginning of a thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """The message that the tokens of an answer represent, and how it was read."""

    message: Message
    """Content, reasoning and calls of tools."""
    stop: str = ""
    """The stop string that ended it; empty if none did."""
    problems: tuple[str, ...] = ()
    """Text that looks like a call of a tool but is not a valid one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The writer and reader of messages for one model: it renders messages as tokens, and reads sampled tokens as a
    message."""

    tokenizer: Tokenizer
    """The tokenizer of the model."""
    renderer: Renderer | None
    """The renderer of messages; ``None`` for a model without a chat template, which reads tokens only."""
    parser: Parser
    """The parser that finds calls of tools in an answer."""
    stop_ids: frozenset[int]
    """Tokens that end an answer. They are not part of its text."""
    hidden_ids: frozenset[int]
    """Special tokens that are not part of an answer's text."""
    longest_token: int
    """The most characters of one token, which bounds how much text a context can hold."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, stop_ids: Sequence[int], parser: str = "auto") -> Self:
        """Return the chat of the model with this ``tokenizer``. ``stop_ids`` are the tokens that end an answer, and
        ``parser`` is a value of ``env.tool_parser``."""
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
        """Return whether the prompt ends with the tag that opens a thought, so that the answer begins within the
        thought."""
        return _opens_thought(self.tokenizer, tuple(prompt_ids_T[-_TAIL:].tolist()))

    def read(self, turn: int, ids: Sequence[int], reading: Reading) -> ReadAnswer:
        """Return the message that the sampled ``ids`` of turn ``turn`` represent. The number of the turn becomes part
        of the ids of its calls."""
        last = len(ids) - 1
        spoken = [token for place, token in enumerate(ids) if token not in self.hidden_ids]
        if ids and ids[last] in self.stop_ids and spoken and spoken[-1] == ids[last]:
            spoken.pop()
        text = self.tokenizer.decode(spoken, skip_special_tokens=False)
        cut, ended_by = min(
            ((place, string) for string in reading.stop if (place := text.find(string)) >= 0), default=(None, "")
        )
        reasoning, rest = split_reasoning(text[:cut], opened=reading.opened)
        answer = self.parser(rest) if reading.calls else ParsedAnswer(content=rest)
        made = tuple(
            ToolCall(id=f"call_{turn}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(answer.calls)
        )
        message = Message(role="assistant", content=answer.content, reasoning=reasoning, tool_calls=made)
        return ReadAnswer(message=message, stop=ended_by, problems=answer.problems)


@lru_cache(maxsize=4096)  # siblings begin alike
def _opens_thought(tokenizer: Tokenizer, tail: tuple[int, ...]) -> bool:
    """Return whether the text of the last tokens of a prompt ends with the tag that opens a thought."""
    return tokenizer.decode(list(tail), skip_special_tokens=False).rstrip().endswith(THINK)
