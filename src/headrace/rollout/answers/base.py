"""What reads an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.text import overlap

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """The text of an answer, taken apart."""

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments (a JSON object as text) of each call."""
    problems: tuple[str, ...] = ()
    """What looked like a call and cannot be read; it stays in the content."""


class Parser(Protocol):
    """Finds the calls of tools in an answer; never raises, whatever the text is."""

    markers: tuple[str, ...]
    """Tokens that it needs to see, even where the tokenizer counts them as special."""

    def __call__(self, text: str) -> ParsedAnswer:
        """Take ``text`` apart."""
        ...

    def num_certain(self, text: str) -> int:
        """How many characters the content of an answer that begins with ``text`` has in common with it, whatever
        follows."""
        ...


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """What was thought, and what was said after it. Text without the beginning of a thought was said; where the prompt
    has ``opened`` one, it goes on.

    >>> split_reasoning("<think>2+2 is 4.</think>4"), split_reasoning("so be it</think>4", opened=True)
    (('2+2 is 4.', '4'), ('so be it', '4'))
    >>> split_reasoning("4"), split_reasoning("hm", opened=True), split_reasoning("4</think>")
    (('', '4'), ('hm', ''), ('', '4</think>'))
    """
    if not (opened or text.lstrip().startswith(THINK)):
        return "", text
    thought, _, said = text.partition(THOUGHT)
    return thought.lstrip().removeprefix(THINK).strip("\n"), said.lstrip("\n")


def certain_split(text: str, *, opened: bool = False) -> tuple[str, str]:
    """What :func:`split_reasoning` begins with, whatever follows ``text``.

    >>> certain_split("<thi"), certain_split("<think>2+2\\n</th"), certain_split("<think>a</think>\\n\\nb")
    (('', ''), ('2+2', ''), ('a', 'b'))
    >>> certain_split("4 <thi"), certain_split("so be it", opened=True)
    (('', '4 <thi'), ('so be it', ''))
    """
    begun = text.lstrip()
    if THINK.startswith(begun):
        return "", ""
    if not opened and not begun.startswith(THINK):
        return "", text
    if THOUGHT in text:
        return split_reasoning(text, opened=opened)
    thought = begun.removeprefix(THINK)
    return thought[: len(thought) - overlap(thought, THOUGHT)].strip("\n"), ""


def read_call(text: str) -> tuple[str, str] | str:
    """Name and arguments of the call that the JSON object ``text`` is, or what is wrong with it.

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
    told = json.dumps(arguments, ensure_ascii=False)
    try:
        (call["name"] + told).encode()
    except UnicodeEncodeError:
        return "a call with half a character"
    return call["name"], told
