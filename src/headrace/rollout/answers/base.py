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


def certain_split(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Return the parts of :func:`split_reasoning` that cannot change, whatever follows ``text``.

    >>> certain_split("<thi"), certain_split("<think>2+2\\n</th"), certain_split("<think>a</think>\\n\\nb")
    (('', ''), ('2+2', ''), ('a', 'b'))
    >>> certain_split("4 <thi"), certain_split("so be it", opened=True)
    (('', '4 <thi'), ('so be it', ''))
    """
    stripped = text.lstrip()
    if THINK.startswith(stripped):
        return "", ""
    if not opened and not stripped.startswith(THINK):
        return "", text
    if THOUGHT in text:
        return split_reasoning(text, opened=opened)
    thought = stripped.removeprefix(THINK)
    return thought[: len(thought) - overlap(thought, THOUGHT)].strip("\n"), ""


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
