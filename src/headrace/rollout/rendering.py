"""The rendering of chat messages as tokens: of a whole conversation, or of the messages after a sampled answer.

A sampled answer is never rendered, because its tokens must stay the sampled tokens. To find the tokens after it, a
conversation with a placeholder as the answer is rendered twice: as it is, and with the new messages after it:

    user · assistant ANSWER▐<|im_end|>⏎                                            its tail
    user · assistant ANSWER▐<|im_end|>⏎<|im_start|>user⏎…<|im_start|>assistant⏎    tail and new messages

The *tail* is the text with which the template ends an answer. The next input of the model is the text after the bar,
without the part of the tail that the model has sampled itself. Templates that rewrite earlier turns change only the
text before the bar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import Message, Tool

ANSWER = "⟪an answer⟫"
"""The placeholder for an answer in the rendered conversation. It is never tokenised."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "."}


class Tokenizer(Protocol):
    """The attributes and methods of a Hugging Face tokenizer that are needed to convert prompts, and to render and read
    messages."""

    chat_template: str | None
    all_special_ids: list[int]

    def __hash__(self) -> int:
        """Return a hash of the object's identity, so that a tokenizer can be a key of a cache."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, by the token's text."""

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """Return the id of the token with this text."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Return the conversation as the text that the model reads."""


class Renderer:
    """A renderer of messages that uses the chat template of ``tokenizer``. If the template does not support tools,
    their descriptions are written into the text of the system message.

    Every method raises :class:`~headrace.base.errors.EpisodeError` (``template_error``) if the template refuses its
    input.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        """Create a renderer for ``tokenizer``, which includes the chat template. ``stop_ids`` are the ids of the tokens
        that end an answer."""
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self.knows_tools = "tools" in (tokenizer.chat_template or "")
        """Whether the template inserts the descriptions of tools."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the token ids of a conversation that begins with ``messages`` and offers ``tools``, up to the point
        where the model answers."""
        return self._encode(self._render([plain(message) for message in messages], tools, answer=True))

    def continuation(self, messages: Sequence[Message], tools: Sequence[Tool], answer_ids: Sequence[int]) -> list[int]:
        """Return the token ids between the sampled answer ``answer_ids`` and the next answer: the rest of the tail of
        the sampled answer, then the new ``messages``. ``tools`` are the tools that the conversation offers."""
        new_messages = [plain(message) for message in messages]
        try:
            tail, ids = self._after_answer(new_messages, tools)
        except EpisodeError:
            calls = [_call(message.tool_call_id) for message in messages if message.role == "tool"]
            if not calls:
                raise
            tail, ids = self._after_calls(calls, new_messages, tools)
        num_tail = _num_same(tail, ids)
        return ids[self._num_sampled(ids[:num_tail], answer_ids) :]

    def _after_answer(self, new_messages: list[dict[str, Any]], tools: Sequence[Tool]) -> tuple[list[int], list[int]]:
        """Return two lists of token ids: the tail of an answer, and the same tail followed by ``new_messages``. The
        conversation offers ``tools``."""
        conversation = [_QUESTION, {"role": "assistant", "content": ANSWER}]
        before, placeholder, tail = self._render(conversation, tools, answer=False).partition(ANSWER)
        _, second_placeholder, whole = self._render([*conversation, *new_messages], tools, answer=True).partition(
            ANSWER
        )
        # the placeholder must appear exactly where the answer belongs, or the tail cannot be separated
        if not (placeholder and second_placeholder) or ANSWER in before:
            raise _template_error("it leaves out what an assistant says")
        return self._encode(tail[: _num_same(tail, whole)]), self._encode(whole)

    def _after_calls(
        self, calls: list[dict[str, Any]], new_messages: list[dict[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """Return the same two lists as :meth:`_after_answer`, for a template that accepts the result of a tool only
        after the tool's call. Both lists begin with the stop token that ends the assistant's message with the
        ``calls``."""
        conversation = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        whole = self._render([*conversation, *new_messages], tools, answer=True)
        same = self._encode(whole[: _num_same(self._render(conversation, tools, answer=False), whole)])
        stops = [index for index, token in enumerate(same) if token in self._stop_ids]
        if not stops:
            raise _template_error("it ends a tool's call without a stop token")
        return same[stops[-1] :], self._encode(whole)[stops[-1] :]

    def _num_sampled(self, tail: list[int], answer_ids: Sequence[int]) -> int:
        """Return how many tokens at the beginning of ``tail`` the model has sampled itself, as the last tokens of
        ``answer_ids``. If the model has sampled a different stop token than the template writes, the result is 1."""
        # the longest end of the answer that is a beginning of the tail was sampled by the model
        for count in range(min(len(tail), len(answer_ids)), 0, -1):
            if list(answer_ids[-count:]) == tail[:count]:
                return count
        has_stopped = len(answer_ids) > 0 and answer_ids[-1] in self._stop_ids
        return int(has_stopped and bool(tail) and tail[0] in self._stop_ids)

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text, without the special tokens that a tokenizer would add."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, answer: bool) -> str:
        """Return ``messages`` as text, by the chat template; ``tools`` are described in it. With ``answer``, the text
        ends with the beginning of the assistant's next message."""
        specs: list[dict[str, Any]] | None = [spec(tool) for tool in tools] or None
        if not self.knows_tools:
            messages, specs = without_tools(messages, tools), None
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=specs, tokenize=False, add_generation_prompt=answer
            )
        except Exception as error:  # noqa: BLE001 - a template is code of the model directory
            raise _template_error(f"{type(error).__name__}: {error}") from None


def _num_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    differing = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


def plain(message: Message) -> dict[str, Any]:
    """Return a message as the dictionary that chat templates accept."""
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        converted["reasoning_content"] = message.reasoning
    if message.tool_calls:
        converted["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    if message.tool_call_id:
        converted["tool_call_id"] = message.tool_call_id
    if message.name:
        converted["name"] = message.name
    return converted


def without_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the conversation ``messages`` for a template that does not support tools: the system message describes
    ``tools``, a call is JSON in the text of the assistant, and the result of a tool is a message of the user."""
    converted: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"Answer of {message.get('name', 'the tool')}: {message['content']}"
            converted.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            converted.append({"role": "assistant", "content": "\n".join([message["content"], *calls]).strip()})
        else:
            converted.append(message)
    if not tools:
        return converted
    listed = "\n".join(json.dumps(spec(tool)["function"], ensure_ascii=False) for tool in tools)
    text = f'You can call tools. To call one, answer with {{"name": ..., "arguments": {{...}}}} only.\n{listed}'
    if converted and converted[0]["role"] == "system":
        return [{**converted[0], "content": f"{converted[0]['content']}\n\n{text}"}, *converted[1:]]
    return [{"role": "system", "content": text}, *converted]


def spec(tool: Tool) -> dict[str, Any]:
    """Return the description of a tool as the dictionary that chat templates accept."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _call(name: str, function: str = "f", arguments: str = "{}") -> dict[str, Any]:
    """Return a tool call as the dictionary that chat templates accept. The arguments become an object if they are JSON,
    and stay text otherwise."""
    try:
        converted: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        converted = arguments
    return {"id": name, "type": "function", "function": {"name": function, "arguments": converted}}


def _template_error(text: str) -> EpisodeError:
    """Return the error for a conversation that the chat template refuses. ``text`` says why."""
    return EpisodeError(
        f"the chat template refuses the conversation: {text}",
        remedy="send messages that it knows, or fix the template of the model directory",
        reason="template_error",
    )
