"""The contract of a parser of answers, and the separation of reasoning from content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headrace.engine.text import overlap

THINK, THOUGHT = "<think>", "</think>"

MAX_BEGINNING = 64
"""Number of characters up to which text that is held back is looked at again whenever some is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The content of an answer and its calls of tools."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """The name and the arguments (a JSON object as text) of each call."""
    problems: tuple[str, ...] = ()
    """Descriptions of invalid calls, whose text remains in the content."""


class Parser(Protocol):
    """A function that separates the content of an answer from the calls of tools in it. It never raises, whatever the
    text is."""

    markers: tuple[str, ...]
    """The strings that mark calls. Decoding must keep them in the text, even if the tokenizer lists them as special
    tokens."""

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the content and the calls of a whole answer."""
        ...

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Return how many characters of ``text``, the beginning of an answer that is still being sampled, belong to the
        content however the answer goes on. They can be streamed to the client now; the rest may become a call.

        With ``begun``, ``text`` is not the beginning: it follows content that earlier calls found certain."""
        ...


@runtime_checkable
class FramedParser(Parser, Protocol):
    """A parser of calls that a grammar can describe: each is a JSON object with ``name`` and ``arguments`` in a
    frame."""

    frame: tuple[str, str]
    """The texts before and after the JSON of a call; where they are empty, the answer is one call."""


class ContentFilter:
    """A filter of the content of one answer: it passes on what is certain, and holds back what may be a call.

    Each character is looked at a bounded number of times, however long the answer is, so the time is linear in its
    length.
    """

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._begun = False
        self._held: list[str] = []
        self._num_held = 0
        self._next_look = 0
        """Number of held characters at which the parser looks at them again."""

    def push(self, text: str) -> str:
        """Append text, and return the content that has become certain."""
        self._held.append(text)
        self._num_held += len(text)
        if self._num_held < self._next_look:
            return ""
        held = "".join(self._held)
        num = self._parser.num_certain(held, begun=True) if self._begun else self._parser.num_certain(held)
        self._begun = self._begun or num > 0
        self._held, self._num_held = [held[num:]], len(held) - num
        # more than the beginning of a call is a call, or nearly always so: to look at it at every token would take time
        # that grows with the square of its length
        self._next_look = 2 * self._num_held if self._num_held > MAX_BEGINNING else 0
        return held[:num]


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Return the reasoning, and the content after it. Text that does not begin with a thought is content, unless the
    prompt has ``opened`` a thought.

    >>> split_reasoning("<think>2+2 is 4.</think>4"), split_reasoning("so be it</think>4", opened=True)
    (('2+2 is 4.', '4'), ('so be it', '4'))
    >>> split_reasoning("4"), split_reasoning("hm", opened=True), split_reasoning("4</think>")
    (('', '4'), ('hm', ''), ('', '4</think>'))
    """
    if not (opened or text.lstrip().startswith(THINK)):
        return "", text
    thought, _, content = text.partition(THOUGHT)
    return thought.lstrip().removeprefix(THINK).strip("\n"), content.lstrip("\n")


class ReasoningFilter:
    """A filter of the text of one answer: it passes on the parts of :func:`split_reasoning` that cannot change,
    whatever follows. Its time is linear in the length of the text.

    >>> filter_ = ReasoningFilter()
    >>> [filter_.push(text) for text in ("<thi", "nk>2+2\\n", "</th", "ink>\\n\\n", "4")]
    [('', ''), ('2+2', ''), ('', ''), ('', ''), ('', '4')]
    >>> ReasoningFilter().push("4 <thi"), ReasoningFilter(opened=True).push("so be it")
    (('', '4 <thi'), ('so be it', ''))
    """

    def __init__(self, *, opened: bool = False) -> None:
        self._opened = opened
        self._held: list[str] | None = []
        """The text so far, until it is certain whether it begins with a thought; ``None`` afterwards."""
        self._first = ""
        """The first characters that are no space, one more than a tag has."""
        self._in_thought = self._blank = True
        """Whether the closing tag has not come; and whether there was nothing but empty lines, before the first text of
        the thought and of the content."""
        self._num_lines = 0
        """Number of line ends that are held back: those at the end of the thought are not part of it."""
        self._tag = ""
        """The text after them, which may begin the closing tag."""

    def push(self, text: str) -> tuple[str, str]:
        """Append text, and return the reasoning and the content that have become certain."""
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
            thought, tag, text = (self._tag + text).partition(THOUGHT)
            reasoning = self._reasoning(thought, ended=bool(tag))
            if not tag:
                return reasoning, ""
            self._in_thought, self._blank = False, True
        if self._blank:
            text = text.lstrip("\n")
            self._blank = not text
        return reasoning, text

    def _reasoning(self, thought: str, *, ended: bool) -> str:
        """Return the certain part of what is added to the thought, and hold back the rest of it."""
        if not ended:
            length = len(thought) - overlap(thought, THOUGHT)
            thought, self._tag = thought[:length], thought[length:]
        if self._blank:
            thought = thought.lstrip("\n")
            self._blank = not thought
        stripped = thought.rstrip("\n")
        lines = "\n" * self._num_lines if stripped else ""
        self._num_lines = len(thought) - len(stripped) + (0 if stripped else self._num_lines)
        return lines + stripped


def read_call(text: str) -> tuple[str, str] | str:
    """Return the name and arguments of the call that the JSON object ``text`` represents, or a description of the
    problem.

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
