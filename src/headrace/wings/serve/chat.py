"""The tokenizer of the served model, with its chat template and its stop tokens. A thought is the text that some models
write before an answer, between ``<think>`` and ``</think>``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.chat import Message, Tool
from headrace.rollout.answers import make_parser
from headrace.rollout.answers.base import THINK
from headrace.rollout.rendering import plain, spec, without_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that a chat template may raise for unexpected messages. The template is a Jinja program from the model's
directory."""

_TAIL = 16
"""The number of tokens at the end of a prompt that are searched for ``<think>``."""


class ServedTokenizer:
    """A tokenizer that converts text to token ids and back. Its methods may be called from any thread."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...], tool_parser: str = "auto"
    ) -> None:
        """Wrap ``tokenizer``. ``stop_ids`` are the model's own end-of-sequence tokens. ``tool_parser`` is the name of
        the parser that finds calls of tools in answers; ``auto`` selects it by the chat template."""
        self._tokenizer = tokenizer
        template = str(tokenizer.chat_template or "")
        self._knows_tools = "tools" in template
        """Whether the chat template renders tools."""
        self.parser = make_parser(tool_parser, template)
        """The parser that finds calls of tools in an answer."""
        special = set(tokenizer.all_special_tokens)
        self.special_markers = frozenset(special.intersection(self.parser.markers))
        """The markers of the parser that the tokenizer has as special tokens."""
        unseen = tokenizer.convert_tokens_to_ids(sorted(special - self.special_markers))
        self._hidden_ids = frozenset((*unseen, *stop_ids))
        """The special tokens and stop tokens that answers with calls leave out; markers of calls are kept."""
        self.stop_ids = stop_ids
        """The model's own end-of-sequence tokens."""
        self.has_template = tokenizer.chat_template is not None
        self.vocab_size = len(tokenizer)
        """Number of tokens that have a text."""
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """Largest number of characters of one token."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, a plain prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text rendered by the chat template, which already contains its special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return ``messages`` rendered by the chat template, with the beginning of the assistant's turn if
        ``add_generation_prompt`` is set. If the template does not support ``tools``, they are described in the system
        message. Raises :class:`Refusal` if there is no template, if the template refuses the messages, or if
        ``variables`` has a reserved name."""
        if not self.has_template:
            raise Refusal(
                "the model's tokenizer has no chat template",
                remedy="use /v1/completions, or put a chat_template.jinja into the model's directory",
                param="messages",
                code="no_chat_template",
            )
        taken = sorted(variables.keys() & _list_reserved_names(self._tokenizer))
        if taken:
            raise Refusal(
                f"chat_template_kwargs holds {excerpt(taken[0])}, which is not the template's",
                remedy="leave it out",
                param="chat_template_kwargs",
            )
        written, specs = [plain(message) for message in messages], [spec(tool) for tool in tools] or None
        if not self._knows_tools:
            written, specs = without_tools(written, tools), None
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    written, tools=specs, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
                )
            )
        except _TEMPLATE_ERRORS as error:
            raise Refusal(
                f"the chat template refuses the messages: {excerpt(str(error), 200)}",
                remedy="look at the roles, their order and the contents that this model's template expects",
                param="messages",
                code="chat_template_error",
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens and without cleaning up spaces."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_calls(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` for an answer that may call tools: without stop tokens and special tokens, but
        with the special tokens that mark a call, which the parser needs."""
        return self.decode_all([token for token in ids if token not in self._hidden_ids])

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt with the tokens ``prompt_ids`` ends with ``<think>``, so that the answer begins
        within a thought."""
        return self.decode_all(prompt_ids[-_TAIL:]).rstrip().endswith(THINK)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` with special tokens, in which the engine searches for stop strings."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def spell(self, token: int) -> str:
        """Return the text of one token alone, also of a special token."""
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text


def _list_reserved_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of variables that ``chat_template_kwargs`` of a request must not set, because they are
    parameters of the rendering function."""
    return frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages", "add_special_tokens"}
