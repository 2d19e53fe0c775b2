"""The contract of a parser that finds tool calls in answers, and the separation of reasoning from content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headrace.engine.text import overlap

THINK, END_THINK = "<think>", "</think>"

MAX_BEGINNING = 64
"""The number of characters up to which delayed text is parsed again whenever new text arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The content and the tool calls of an answer, as a :class:`Parser` has separated them."""

    content: str
    """The text of the answer without its tool calls."""
    calls: tuple[tuple[str, str], ...] = ()
    """The name and the arguments of each tool call. The arguments are a JSON object as text."""
    problems: tuple[str, ...] = ()
    """Descriptions of the invalid calls. The text of these calls remains in the content."""


class Parser(Protocol):
    """A callable that separates the content of an answer from its tool calls. It raises no error for any text."""

    markers: tuple[str, ...]
    """The strings that mark tool calls. Decoding must keep them in the text, even if the tokenizer lists them as
    special tokens."""

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the content and the tool calls of ``text``, a complete answer."""

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Return how many characters at the start of ``text`` are certainly content. ``text`` is the beginning of an
        answer that is still being sampled. The returned number of characters can be streamed to the client now; the
        rest may become a tool call.

        With ``begun``, ``text`` is not the beginning of the answer, but follows text that an earlier call of this
        method returned as content."""


@runtime_checkable
class FramedParser(Parser, Protocol):
    """A parser of tool calls that a grammar can describe: each call is a JSON object with ``name`` and ``arguments``
    between two fixed texts, the frame."""

    frame: tuple[str, str]
    """The texts before and after the JSON of a call. If both are empty, the whole answer is one call."""


class ContentFilter:
    """A filter for the content of one streamed answer. It returns text that is certainly content, and delays text that
    may be part of a tool call.

    Each character is parsed a bounded number of times, so the total time is linear in the length of the answer.
    """

    def __init__(self, parser: Parser) -> None:
        """Create a filter for an answer without text so far. ``parser`` decides which text is certainly content."""
        self._parser = parser
        self._has_content = False
        """Whether content was returned, so that the delayed text is not the beginning of the answer."""
        self._held: list[str] = []
        """The pieces of the delayed text, in order."""
        self._num_held = 0
        """The number of characters of the delayed text."""
        self._parse_at = 0
        """The number of delayed characters from which the parser is called again."""

    def push(self, text: str) -> str:
        """Append ``text``, newly sampled, and return the content that has become certain since the last call."""
        self._held.append(text)
        self._num_held += len(text)
        if self._num_held < self._parse_at:
            return ""
        held = "".join(self._held)
        num = self._parser.num_certain(held, begun=True) if self._has_content else self._parser.num_certain(held)
        self._has_content = self._has_content or num > 0
        self._held, self._num_held = [held[num:]], len(held) - num
        # text longer than the beginning of a call is almost always a call: parsing it at every token would take time
        # that grows with the square of its length
        self._parse_at = 2 * self._num_held if self._num_held > MAX_BEGINNING else 0
        return held[:num]


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Return the reasoning and the content of an answer. The reasoning is the text between ``<think>`` and ``</think>``
    at the beginning of the answer. If the text does not begin with ``<think>``, all of it is content, unless ``opened``
    says that the prompt ends with ``<think>``.

    >>> split_reasoning("<think>2+2 is 4.</think>4"), split_reasoning("so be it</think>4", opened=True)
    (('2+2 is 4.', '4'), ('so be it', '4'))
    >>> split_reasoning("4"), split_reasoning("hm", opened=True), split_reasoning("4</think>")
    (('', '4'), ('hm', ''), ('', '4</think>'))
    """
    if not (opened or text.lstrip().startswith(THINK)):
        return "", text
    thought, _, content = text.partition(END_THINK)
    return thought.lstrip().removeprefix(THINK).strip("\n"), content.lstrip("\n")


class ReasoningFilter:
    """A filter that separates reasoning from content in a streamed answer. It returns the parts of the result of
    :func:`split_reasoning` that later text cannot change. Its time is linear in the length of the text.

    >>> filter_ = ReasoningFilter()
    >>> [filter_.push(text) for text in ("<thi", "nk>2+2\\n", "</th", "ink>\\n\\n", "4")]
    [('', ''), ('2+2', ''), ('', ''), ('', ''), ('', '4')]
    >>> ReasoningFilter().push("4 <thi"), ReasoningFilter(opened=True).push("so be it")
    (('', '4 <thi'), ('so be it', ''))
    """

    def __init__(self, *, opened: bool = False) -> None:
        """Create a filter for an answer without text so far. ``opened`` says that the prompt ends with the opening tag,
        so that the text begins inside the thought."""
        self._opened = opened
        self._held: list[str] | None = []
        """The text so far, while it is not certain whether the answer begins with a thought; ``None`` afterwards."""
        self._first = ""
        """The first characters after leading white space, at most one more than the opening tag has."""
        self._in_thought = self._blank = True
        """``_in_thought``: whether the closing tag has not arrived yet. ``_blank``: whether the current part, the
        thought or the content, consists only of line ends so far."""
        self._num_lines = 0
        """The number of delayed line ends. Line ends at the end of the thought are not part of the thought."""
        self._tag = ""
        """The end of the text so far, if it may be the beginning of the closing tag; empty otherwise."""

    def push(self, text: str) -> tuple[str, str]:
        """Append ``text``, newly sampled, and return the reasoning and the content that have become certain since the
        last call."""
        if self._held is not None:
            self._held.append(text)
            self._first = (self._first + text).lstrip()[: len(THINK) + 1]
            if THINK.startswith(self._first):
                return "", ""
            text, self._held = "".join(self._held), None
            self._in_thought = self._opened or self._first.startswith(THINK)
            if not self._in_thought:
                self._blank = False
            else:
                text = text.lstrip().removeprefix(THINK)
        reasoning = ""
        if self._in_thought:
            thought, tag, text = (self._tag + text).partition(END_THINK)
            reasoning = self._push_thought(thought, ended=bool(tag))
            if not tag:
                return reasoning, ""
            self._in_thought, self._blank = False, True
        if self._blank:
            text = text.lstrip("\n")
            self._blank = not text
        return reasoning, text

    def _push_thought(self, thought: str, *, ended: bool) -> str:
        """Append ``thought`` to the reasoning and return the part of it that is certain. Line ends at its end, and text
        that may be the beginning of the closing tag, are delayed. ``ended`` says that the closing tag follows."""
        if not ended:
            length = len(thought) - overlap(thought, END_THINK)
            thought, self._tag = thought[:length], thought[length:]
        if self._blank:
            thought = thought.lstrip("\n")
            self._blank = not thought
        stripped = thought.rstrip("\n")
        lines = "\n" * self._num_lines if stripped else ""
        self._num_lines = len(thought) - len(stripped) + (0 if stripped else self._num_lines)
        return lines + stripped


def read_call(text: str) -> tuple[str, str] | str:
    """Return the name and the arguments of the tool call that the JSON object ``text`` represents. If it is not a valid
    call, return a description of the problem.

    >>> read_call('{"name": "add", "arguments": {"a": 1}}'), read_call('{"name": 1}')
    (('add', '{"a": 1}'), 'a call without a name')
    """
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return "a call that is not JSON"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return "a call without a name"
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object once more as text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "arguments that are not JSON"
    if not isinstance(arguments, dict):
        return "arguments that are not an object"
    text_of_arguments = json.dumps(arguments, ensure_ascii=False)
    try:
        (call["name"] + text_of_arguments).encode()
    except UnicodeEncodeError:
        return "a call with half a character"
    return call["name"], text_of_arguments
