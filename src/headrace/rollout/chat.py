"""The conversion between chat messages and the token ids of one model. :class:`Chat` renders messages as tokens through
a :class:`~headrace.rollout.rendering.Renderer`, and reads sampled tokens as a message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from headrace.base.types.chat import Message, ToolCall
from headrace.base.types.tokens import IntColumn
from headrace.rollout.answers import Parser, make_parser, split_reasoning
from headrace.rollout.answers.base import THINK, ParsedAnswer
from headrace.rollout.rendering import Renderer, Tokenizer

_TAIL = 16
"""The number of tokens at the end of a prompt that are searched for the beginning of a thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Options for reading the tokens of an answer as a message."""

    stop: Sequence[str] = ()
    """Strings that end the answer. They are not part of the message."""
    calls: bool = False
    """Whether tools were offered to the model, so that the answer is searched for tool calls."""
    opened: bool = False
    """Whether the prompt ends with the tag that opens a thought, so that the answer begins inside the thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswer:
    """The message that the tokens of an answer represent, and what was found while they were read."""

    message: Message
    """The content, the reasoning and the tool calls of the answer."""
    stop: str = ""
    """The stop string that ended the answer; empty if no stop string did."""
    problems: tuple[str, ...] = ()
    """Descriptions of tool calls that are not valid and remain in the content as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The converter between messages and tokens for one model: it renders messages as tokens, and reads sampled tokens
    as a message."""

    tokenizer: Tokenizer
    """The tokenizer of the model."""
    renderer: Renderer | None
    """The renderer of messages. ``None`` for a model without a chat template; such a model accepts token ids only."""
    parser: Parser
    """The parser that finds tool calls in the text of an answer."""
    stop_ids: frozenset[int]
    """Ids of the tokens that end an answer. They are not part of its text."""
    hidden_ids: frozenset[int]
    """Ids of the special tokens that are omitted from an answer's text."""
    longest_token: int
    """The number of characters of the longest token. It bounds how much text fits into a context."""

    @classmethod
    def create(cls, tokenizer: Tokenizer, stop_ids: Sequence[int], parser: str = "auto") -> Self:
        """Build the converter for the model with this ``tokenizer``. ``stop_ids`` are the tokens that end an answer,
        and ``parser`` is a value of ``env.tool_parser``."""
        template = tokenizer.chat_template
        chosen_parser = make_parser(parser, template or "")
        marker_ids = {tokenizer.convert_tokens_to_ids(marker) for marker in chosen_parser.markers}
        return cls(
            tokenizer=tokenizer,
            renderer=None if template is None else Renderer(tokenizer, stop_ids),
            parser=chosen_parser,
            stop_ids=frozenset(stop_ids),
            hidden_ids=frozenset(tokenizer.all_special_ids) - marker_ids,
            longest_token=max(map(len, tokenizer.get_vocab())),
        )

    def opens_thought(self, prompt_ids_T: IntColumn) -> bool:
        """Return whether the prompt ends with the tag that opens a thought. The answer then begins inside the
        thought."""
        return _opens_thought(self.tokenizer, tuple(prompt_ids_T[-_TAIL:].tolist()))

    def read(self, turn: int, ids: Sequence[int], reading: Reading) -> ReadAnswer:
        """Return the message that ``ids``, the sampled tokens of turn ``turn``, represent. The number of the turn
        becomes part of the ids of the tool calls. ``reading`` are the options for reading the tokens."""
        text_ids = [token for token in ids if token not in self.hidden_ids]
        if ids and ids[-1] in self.stop_ids and text_ids and text_ids[-1] == ids[-1]:
            text_ids.pop()
        text = self.tokenizer.decode(text_ids, skip_special_tokens=False)
        cut, stop_string = min(
            ((start, string) for string in reading.stop if (start := text.find(string)) >= 0), default=(None, "")
        )
        reasoning, rest = split_reasoning(text[:cut], opened=reading.opened)
        answer = self.parser(rest) if reading.calls else ParsedAnswer(content=rest)
        tool_calls_found = tuple(
            ToolCall(id=f"call_{turn}_{number}", name=name, arguments=arguments)
            for number, (name, arguments) in enumerate(answer.calls)
        )
        message = Message(role="assistant", content=answer.content, reasoning=reasoning, tool_calls=tool_calls_found)
        return ReadAnswer(message=message, stop=stop_string, problems=answer.problems)


@lru_cache(maxsize=4096)  # the siblings of a group have the same prompt
def _opens_thought(tokenizer: Tokenizer, tail: tuple[int, ...]) -> bool:
    """Return whether the text of the last tokens of a prompt ends with the tag that opens a thought."""
    return tokenizer.decode(list(tail), skip_special_tokens=False).rstrip().endswith(THINK)
