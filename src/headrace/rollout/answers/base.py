"""What reads an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
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

    def __call__(self, text: str) -> Answer:
        """Take ``text`` apart."""
        ...


def split_reasoning(text: str) -> tuple[str, str]:
    """What was thought, and what was said after it. Text without an end of thought was said, unless a thought began.

    >>> split_reasoning("<think>2+2 is 4.</think>4"), split_reasoning("so be it</think>4"), split_reasoning("4")
    (('2+2 is 4.', '4'), ('so be it', '4'), ('', '4'))
    """
    thought, ended, said = text.partition(THOUGHT)
    begun = thought.lstrip().startswith(THINK)
    if not ended and not begun:
        return "", text
    return thought.lstrip().removeprefix(THINK).strip("\n"), said.lstrip("\n")


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
