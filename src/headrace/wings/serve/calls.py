"""Calls of tools in chats: the grammar that makes the model call one, and the search for calls in an answer. A tool is
a function of the client that the model may ask for; a call is its name with arguments as JSON.

The parsers are those of the environments (:mod:`headrace.rollout.answers`). A thought (the text between ``<think>`` and
``</think>``) before the answer is part of its text, and calls are looked for after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.net.refusal import Refusal, shown
from headrace.base.types.chat import Tool
from headrace.engine.structure import lark, refuse_endless
from headrace.rollout.answers.base import END_THINK, THINK, ContentFilter, FramedParser, Parser


class CallFinder:
    """A filter of the text of one answer, which arrives in pieces: it passes on the content, and holds back what may be
    a call of a tool until the answer has ended. Its time is linear in the length of the text."""

    def __init__(self, parser: Parser, *, opened: bool) -> None:
        """Make the filter of one answer. ``opened`` says that the prompt ends with ``<think>``, so that the answer
        begins within a thought."""
        self._parser = parser
        self._thought = _Thought(opened=opened)
        self._content = ContentFilter(parser)
        self._rest: list[str] = []
        self._num_shown = 0

    def push(self, text: str, *, ended: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Append text of the answer. Return the content that has become certain and, when the answer has ``ended``, its
        calls: the name and the arguments (JSON) of each; before, no calls."""
        thought, rest = self._thought.push(text, ended=ended)
        self._rest.append(rest)
        if not ended:
            certain = self._content.push(rest)
            self._num_shown += len(certain)
            return thought + certain, ()
        answer = self._parser("".join(self._rest))
        return thought + answer.content[self._num_shown :], answer.calls


class _Place(Enum):
    """How far the text of an answer has come: ``BEGINNING → THOUGHT → AFTER → REST``, or ``BEGINNING → REST``."""

    BEGINNING = "it may begin with a thought"
    THOUGHT = "within the thought"
    AFTER = "among the empty lines after the thought"
    REST = "content and calls"


class _Thought:
    """A filter that divides the text of one answer, which arrives in pieces, into two: the thought at its beginning,
    with its tags and the empty lines after it, and the rest. With ``opened``, the answer begins within a thought."""

    def __init__(self, *, opened: bool) -> None:
        """Divide one answer; with ``opened``, it begins within a thought."""
        self._place = _Place.THOUGHT if opened else _Place.BEGINNING
        self._held: list[str] = []
        """The text so far, until it is certain whether it begins with a thought."""
        self._first = ""
        """The first characters that are no space, as many as a tag has."""
        self._last = ""
        """The last characters of the thought, one less than its closing tag has."""

    def push(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Append text of the answer. Return what it adds to the thought, and what it adds to the rest. Text of which
        both are still possible is held back, unless the answer has ``ended``."""
        thought = ""
        if self._place is _Place.BEGINNING:
            self._held.append(text)
            self._first = (self._first + text).lstrip()[: len(THINK)]
            if not ended and self._first != THINK and THINK.startswith(self._first):
                return "", ""
            text = "".join(self._held)
            self._place = _Place.THOUGHT if self._first == THINK else _Place.REST
        if self._place is _Place.THOUGHT:
            seen = self._last + text
            start = seen.find(END_THINK)
            if start < 0:
                self._last = seen[1 - len(END_THINK) :]
                return text, ""
            end = start + len(END_THINK) - len(self._last)
            thought, text, self._place = text[:end], text[end:], _Place.AFTER
        if self._place is _Place.AFTER:
            rest = text.lstrip("\n")
            thought, text = thought + text[: len(text) - len(rest)], rest
            self._place = _Place.REST if rest else _Place.AFTER
        return thought, text


def forced_calls(
    parser: Parser, tools: Sequence[Tool], *, many: bool, special: frozenset[str] = frozenset()
) -> str:  # fmt: skip
    """Return the description of an answer that is a call of one of ``tools`` and, with ``many``, maybe further ones, in
    the form that the engine takes as the structure of an answer.

    ``special`` are those texts at the beginning and end of a call that are special tokens of the tokenizer. Raises
    :class:`Refusal` for a parser whose calls no grammar describes, and for a tool whose parameters are not those of an
    object, or of one that no finite JSON follows.
    """
    if not isinstance(parser, FramedParser):
        raise Refusal(
            f"tool_choice: calls in the form of {type(parser).__name__} cannot be enforced, since no grammar "
            "describes them",
            remedy="use tool_choice='auto', or serve with serve.tool_parser = 'hermes' or 'json'",
            param="tool_choice",
            code="unsupported_value",
        )
    begin, end = (text if text in special else json.dumps(text) for text in parser.frame)
    framed = f'{begin} "\\n" call "\\n" {end}' if any(parser.frame) else "call"
    rules = [
        'start: one ("\\n" one)*' if many and any(parser.frame) else "start: one",
        f"one: {framed}",
        "call: " + " | ".join(f"call{place}" for place in range(len(tools))),
    ]
    for place, tool in enumerate(tools):
        opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        rules.append(f'call{place}: {opening} arguments{place} "}}"')
        rules.append(f"arguments{place}: %json {json.dumps(_of_object(tool))}")
    return lark("\n".join(rules))


def _of_object(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments, which must be those of an object. Raises :class:`Refusal` for
    another type, and for a schema that no finite JSON follows."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise Refusal(
            f"the parameters of the tool {shown(tool.name)} are of type {shown(kind)}, and arguments are an object",
            remedy="give parameters of type 'object'",
            param="tools",
        )
    schema = {**tool.parameters, "type": "object"}
    try:
        refuse_endless(schema)
    except RequestError as error:
        problem = f"the parameters of the tool {shown(tool.name)}: {error.problem}"
        raise Refusal(problem, remedy=error.remedy, param="tools") from None
    return schema
