"""Messages to tokens: a conversation from its beginning, or only what comes after an answer that was sampled.

An answer is never rendered: its tokens are those that were sampled. What comes after it is found by rendering a held
conversation that ends with a known answer, once as it is and once with the new messages behind it:

    user · assistant ANSWER▐<|im_end|>⏎                                            its tail
    user · assistant ANSWER▐<|im_end|>⏎<|im_start|>user⏎…<|im_start|>assistant⏎    tail and new messages

What stands behind the bar, without the beginning of the tail that the model has sampled itself, is what the model reads
next. Templates that rewrite earlier turns do so before the bar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.base.errors import EpisodeError
from headrace.base.types.chat import Message, Tool

ANSWER = "⟪an answer⟫"
"""Stands for an answer in the held conversation; never tokenised."""
_ASKED: dict[str, Any] = {"role": "user", "content": "."}


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    chat_template: str | None
    all_special_ids: list[int]

    def __hash__(self) -> int:
        """Of the object itself."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids to text."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Every token."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """The id of a token."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        """Messages to the text that the model reads."""
        ...


class Renderer:
    """Renders with the chat template of ``tokenizer``. Where it knows nothing of tools, they are told in words.

    Every method raises :class:`~headrace.base.errors.EpisodeError` (``template_error``) for what the template refuses.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self.knows_tools = "tools" in (tokenizer.chat_template or "")
        """Whether the template tells the model of its tools."""

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """A conversation from its beginning, up to where the model answers."""
        return self._encode(self._render([plain(message) for message in messages], tools, answer=True))

    def continuation(self, messages: Sequence[Message], tools: Sequence[Tool], answer_ids: Sequence[int]) -> list[int]:
        """What the model reads between the answer that it sampled as ``answer_ids`` and its next one."""
        new = [plain(message) for message in messages]
        try:
            tail, ids = self._behind_answer(new, tools)
        except EpisodeError:
            calls = [_call(message.tool_call_id) for message in messages if message.role == "tool"]
            if not calls:
                raise
            tail, ids = self._behind_calls(calls, new, tools)
        num_tail = _num_same(tail, ids)
        return ids[self._num_sampled(ids[:num_tail], answer_ids) :]

    def _behind_answer(self, new: list[dict[str, Any]], tools: Sequence[Tool]) -> tuple[list[int], list[int]]:
        """The tail of the held answer, and what comes with the new messages behind it."""
        held = [_ASKED, {"role": "assistant", "content": ANSWER}]
        before, bar, tail = self._render(held, tools, answer=False).partition(ANSWER)
        _, found, whole = self._render([*held, *new], tools, answer=True).partition(ANSWER)
        if not (bar and found) or ANSWER in before:
            raise _refused("it leaves out what an assistant says")
        return self._encode(tail[: _num_same(tail, whole)]), self._encode(whole)

    def _behind_calls(
        self, calls: list[dict[str, Any]], new: list[dict[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[int], list[int]]:
        """The same for a template that takes a tool's answer only after its call: from the stop token behind it on,
        with which any answer of an assistant ends."""
        held = [_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
        whole = self._render([*held, *new], tools, answer=True)
        same = self._encode(whole[: _num_same(self._render(held, tools, answer=False), whole)])
        stops = [index for index, token in enumerate(same) if token in self._stop_ids]
        if not stops:
            raise _refused("it ends a tool's call without a stop token")
        return same[stops[-1] :], self._encode(whole)[stops[-1] :]

    def _num_sampled(self, tail: list[int], answer_ids: Sequence[int]) -> int:
        """How many tokens of the tail the model has sampled, or put another stop token in their place."""
        for count in range(min(len(tail), len(answer_ids)), 0, -1):
            if list(answer_ids[-count:]) == tail[:count]:
                return count
        stopped = len(answer_ids) > 0 and answer_ids[-1] in self._stop_ids
        return int(stopped and bool(tail) and tail[0] in self._stop_ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Tool], *, answer: bool) -> str:
        specs: list[dict[str, Any]] | None = [_spec(tool) for tool in tools] or None
        if not self.knows_tools:
            messages, specs = in_words(messages, tools), None
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=specs, tokenize=False, add_generation_prompt=answer
            )
        except Exception as error:  # noqa: BLE001 - a template is code of the model directory
            raise _refused(f"{type(error).__name__}: {error}") from None


def _num_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many places two sequences begin alike."""
    same = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def plain(message: Message) -> dict[str, Any]:
    """A message as chat templates read it."""
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    return told


def in_words(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The same conversation for a template without tools: they are told to the system, calls are JSON in the text of
    the assistant, and answers to them come from the user."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            words = f"Answer of {message.get('name', 'the tool')}: {message['content']}"
            told.append({"role": "user", "content": words})
        elif "tool_calls" in message:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
            told.append({"role": "assistant", "content": "\n".join([message["content"], *calls]).strip()})
        else:
            told.append(message)
    if not tools:
        return told
    listed = "\n".join(json.dumps(_spec(tool)["function"], ensure_ascii=False) for tool in tools)
    words = f'You can call tools. To call one, answer with {{"name": ..., "arguments": {{...}}}} only.\n{listed}'
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _spec(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _call(name: str, function: str = "f", arguments: str = "{}") -> dict[str, Any]:
    try:
        told: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        told = arguments
    return {"id": name, "type": "function", "function": {"name": function, "arguments": told}}


def _refused(words: str) -> EpisodeError:
    return EpisodeError(
        f"the chat template refuses the conversation: {words}",
        remedy="send messages that it knows, or mend the template of the model directory",
        reason="template_error",
    )
