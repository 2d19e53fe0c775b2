"""Calls of tools in chats: the grammar that makes the model call one, and the search for calls in an answer.

The parsers are those of the environments (:mod:`headrace.rollout.answers`). A thought before the answer is part of its
text, and calls are looked for after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.net.refusal import Refusal, shown
from headrace.base.types.chat import Tool
from headrace.engine.structure import lark, refuse_endless
from headrace.rollout.answers.base import THINK, THOUGHT, FramedParser, Parser


class CallFinder:
    """A filter of the text of one answer: it passes on the content, and holds back what may be a call until the answer
    has ended."""

    def __init__(self, parser: Parser, *, opened: bool) -> None:
        """Make a filter; ``opened`` says whether the prompt ends with the beginning of a thought."""
        self._parser, self._opened = parser, opened
        self._text = ""
        self._num_shown = 0

    def push(self, text: str, *, ended: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Append text. Return the content that has become certain and, when the answer has ended, its calls: the name
        and the arguments of each."""
        self._text += text
        thought, rest = self._split()
        if not ended:
            return self._show(thought + rest[: self._parser.num_certain(rest)]), ()
        answer = self._parser(rest)
        return self._show(thought + answer.content), answer.calls

    def _split(self) -> tuple[str, str]:
        """Return the thought with its tags and the space after it, and the rest."""
        if not (self._opened or self._text.lstrip().startswith(THINK)):
            return "", self._text
        thought, tag, rest = self._text.partition(THOUGHT)
        stripped = rest.lstrip("\n")
        return thought + tag + rest[: len(rest) - len(stripped)], stripped

    def _show(self, content: str) -> str:
        """Return the part of ``content`` that has not been passed on."""
        shown, self._num_shown = self._num_shown, max(self._num_shown, len(content))
        return content[shown:]


def forced_calls(
    parser: Parser, tools: Sequence[Tool], *, many: bool, special: frozenset[str] = frozenset()
) -> str:  # fmt: skip
    """Return the description of an answer that is a call of one of ``tools`` and, with ``many``, maybe further ones.

    ``special`` are those texts of a frame that are special tokens. Raises :class:`Refusal` for a parser whose calls no
    grammar describes, and for a tool whose parameters are not those of an object, or of one without end.
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
    """Return the schema of the tool's arguments, which are an object."""
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
