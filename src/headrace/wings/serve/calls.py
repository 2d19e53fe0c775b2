"""Calls of tools in chats: the grammar that forces the model to call a tool, and the filter that finds calls in an
answer. A tool is a function of the client. A call is the name of a tool with arguments as JSON.

The parsers are shared with the environments (:mod:`headrace.rollout.answers`). A thought (the text between ``<think>``
and ``</think>``) at the beginning of an answer is part of its content; calls are searched only after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.net.refusal import Refusal, excerpt
from headrace.base.types.chat import Tool
from headrace.engine.structure import lark, refuse_endless
from headrace.rollout.answers.base import END_THINK, THINK, ContentFilter, FramedParser, Parser


class CallFinder:
    """A filter of the text of one answer, which arrives in pieces. It returns the content at once, and holds back text
    that may be a call of a tool until the answer has ended. Its time is linear in the length of the text."""

    def __init__(self, parser: Parser, *, opened: bool) -> None:
        """Create the filter of one answer. ``parser`` finds the calls in its text. ``opened`` is true if the prompt
        ends with ``<think>``, so that the answer begins within a thought."""
        self._parser = parser
        self._thought = _Thought(opened=opened)
        """Divides the answer into the thought at its beginning and the rest."""
        self._content = ContentFilter(parser)
        """Holds back text of the rest that may be a call."""
        self._rest: list[str] = []
        """The pieces of the rest so far."""
        self._num_shown = 0
        """Number of characters of the rest that were returned as content."""

    def push(self, text: str, *, ended: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Append text of the answer. Return the new content that is certainly not part of a call and, when the answer
        has ``ended``, its calls (name and JSON arguments of each); before that, no calls."""
        thought, rest = self._thought.push(text, ended=ended)
        self._rest.append(rest)
        if not ended:
            certain = self._content.push(rest)
            self._num_shown += len(certain)
            return thought + certain, ()
        answer = self._parser("".join(self._rest))
        return thought + answer.content[self._num_shown :], answer.calls


class _Place(Enum):
    """The state of the division of an answer: ``BEGINNING → THOUGHT → AFTER → REST``, or ``BEGINNING → REST``."""

    BEGINNING = "it may begin with a thought"
    THOUGHT = "within the thought"
    AFTER = "among the empty lines after the thought"
    REST = "content and calls"


class _Thought:
    """A filter that divides the text of one answer, which arrives in pieces, into two: the thought at its beginning,
    with its tags and the empty lines after it, and the rest. With ``opened``, the answer begins within a thought."""

    def __init__(self, *, opened: bool) -> None:
        """Create the filter of one answer; with ``opened``, the answer begins within a thought."""
        self._place = _Place.THOUGHT if opened else _Place.BEGINNING
        """The part of the answer in which the next text is."""
        self._held: list[str] = []
        """The text so far, while it is unknown whether it begins with a thought."""
        self._first = ""
        """The first characters that are not whitespace, as many as the opening tag has."""
        self._last = ""
        """The last characters of the thought, one fewer than the closing tag has, since the tag may be split between
        pieces."""

    def push(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Append text of the answer. Return the text that is added to the thought, and the text that is added to the
        rest. Text that may belong to either is held back, unless the answer has ``ended``."""
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


def make_call_structure(
    parser: Parser, tools: Sequence[Tool], *, many: bool, special: frozenset[str] = frozenset()
) -> str:  # fmt: skip
    """Return the structure, in the engine's format, of an answer that is a call of one of ``tools`` or, with ``many``,
    one or more calls.

    ``special`` are the markers of the beginning and end of a call that are special tokens of the tokenizer. Raises
    :class:`Refusal` for a parser whose calls cannot be described by a grammar, and for a tool whose parameters are not
    an object, or whose schema no finite JSON matches.
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
        rules.append(f"arguments{place}: %json {json.dumps(_read_object_schema(tool))}")
    return lark("\n".join(rules))


def _read_object_schema(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments, which must be an object. Raises :class:`Refusal` for another type,
    and for a schema that no finite JSON matches."""
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        raise Refusal(
            f"the parameters of the tool {excerpt(tool.name)} are of type {excerpt(kind)}, and arguments are an object",
            remedy="give parameters of type 'object'",
            param="tools",
        )
    schema = {**tool.parameters, "type": "object"}
    try:
        refuse_endless(schema)
    except RequestError as error:
        problem = f"the parameters of the tool {excerpt(tool.name)}: {error.problem}"
        raise Refusal(problem, remedy=error.remedy, param="tools") from None
    return schema
