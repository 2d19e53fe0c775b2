"""The contract of a parser of answers, and the separation of reasoning from content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headrace.engine.text import overlap

THINK, END_THINK = "<think>", "</think>"

MAX_BEGINNING = 64
"""Number of characters up to which text that is held back is looked at again whenever some is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The content of an answer and its tool calls, as a :class:`Parser` has separated them."""

    content: str
    """The text of the answer without its calls."""
    calls: tuple[tuple[str, str], ...] = ()
    """The name and the arguments (a JSON object as text) of each call."""
    problems: tuple[str, ...] = ()
    """Descriptions of invalid calls, whose text remains in the content."""


class Parser(Protocol):
    """A function that separates the content of an answer from the tool calls in it. It never raises, whatever the text
    is."""

    markers: tuple[str, ...]
    """The strings that mark calls. Decoding must keep them in the text, even if the tokenizer lists them as special
    tokens."""

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the content and the tool calls of ``text``, a whole answer."""
        ...

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Return how many characters of ``text``, the beginning of an answer that is still being sampled, belong to the
        content however the answer goes on. They can be streamed to the client now; the rest may become a call.

        With ``begun``, ``text`` is not the beginning of the answer: it follows text that an earlier call of this method
        has found to be content."""
        ...


@runtime_checkable
class FramedParser(Parser, Protocol):
    """A parser of calls that a grammar can describe: each is a JSON object with ``name`` and ``arguments`` in a
    frame."""

    frame: tuple[str, str]
    """The texts before and after the JSON of a call; if both are empty, the whole answer is one call."""


class ContentFilter:
    """A filter of the content of one answer that is streamed to a client: it passes on text that is certainly content,
    and holds back text that may be part of a tool call.

    Each character is looked at a bounded number of times, however long the answer is, so the time is linear in its
    length.
    """

    def __init__(self, parser: Parser) -> None:
        """Begin an answer without text; ``parser`` says which text is certainly content."""
        self._parser = parser
        self._begun = False
        self._held: list[str] = []
        self._num_held = 0
        self._next_look = 0
        """Number of held characters at which the parser looks at them again."""

    def push(self, text: str) -> str:
        """Append ``text``, newly sampled, and return the content that has become certain and was not returned
        before."""
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
    """Return the reasoning of an answer, and the content after it. Reasoning is a thought between ``<think>`` and
    ``</think>`` at the beginning. Text that does not begin with a thought is content, unless the prompt has ``opened``
    a thought.

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
    """A filter of the text of one answer: it passes on the parts of :func:`split_reasoning` that cannot change,
    whatever follows. Its time is linear in the length of the text.

    >>> filter_ = ReasoningFilter()
    >>> [filter_.push(text) for text in ("<thi", "nk>2+2\\n", "</th", "ink>\\n\\n", "4")]
    [('', ''), ('2+2', ''), ('', ''), ('', ''), ('', '4')]
    >>> ReasoningFilter().push("4 <thi"), ReasoningFilter(opened=True).push("so be it")
    (('', '4 <thi'), ('so be it', ''))
    """

    def __init__(self, *, opened: bool = False) -> None:
        """Begin an answer without text; ``opened`` says that the prompt has opened a thought, so that the text begins
        within it."""
        self._opened = opened
        self._held: list[str] | None = []
        """The text so far, until it is certain whether it begins with a thought; ``None`` afterwards."""
        self._first = ""
        """The first characters of the text after leading white space, at most one more than the opening tag has."""
        self._in_thought = self._blank = True
        """Whether the closing tag has not arrived yet; and whether the part that arrives now, the thought or the
        content, has had nothing but line ends so far."""
        self._num_lines = 0
        """Number of line ends that are held back: those at the end of the thought are not part of it."""
        self._tag = ""
        """The end of the text so far, if it may be the beginning of the closing tag."""

    def push(self, text: str) -> tuple[str, str]:
        """Append ``text``, newly sampled, and return the reasoning and the content that have become certain and were
        not returned before."""
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
            reasoning = self._reasoning(thought, ended=bool(tag))
            if not tag:
                return reasoning, ""
            self._in_thought, self._blank = False, True
        if self._blank:
            text = text.lstrip("\n")
            self._blank = not text
        return reasoning, text

    def _reasoning(self, thought: str, *, ended: bool) -> str:
        """Return the certain part of ``thought``, which is added to the reasoning, and hold back the rest of it: line
        ends, and what may be the beginning of the closing tag. ``ended`` says that the closing tag follows."""
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
