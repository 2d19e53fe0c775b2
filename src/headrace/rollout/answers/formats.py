"""The parsers of the formats in which models write tool calls.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen and many others
json     {"name": ..., "arguments": {...}}                             Llama, and models without tools in the template
"""

from __future__ import annotations

import re

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """A parser that reads each text between a pair of tags as a tool call. All other text is content. It implements
    :class:`~headrace.rollout.answers.base.FramedParser`."""

    markers: tuple[str, ...] = (BEGIN, END)
    frame: tuple[str, str] = (BEGIN, END)

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the content and the tool calls of a complete answer. A call that is invalid or has no closing tag
        stays in the content and is described in ``problems``."""
        calls: list[tuple[str, str]] = []
        problems: list[str] = []
        content, *blocks = text.split(BEGIN)
        for block in blocks:
            inside, ended, after = block.partition(END)
            call = read_call(inside) if ended else "a call without an end"
            if isinstance(call, str):
                problems.append(call)
                content += BEGIN + block
                continue
            calls.append(call)
            content += after
        content = content.rstrip() if calls else text
        return ParsedAnswer(content=content, calls=tuple(calls), problems=tuple(problems))

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Return how many characters are content whatever follows: the characters before the first tag, or before text
        that may be the beginning of a tag, without the white space at their end."""
        before, found, _ = text.partition(BEGIN)
        return len((before if found else before[: len(before) - overlap(before, BEGIN)]).rstrip())


_TAG, _FENCE = "<|python_tag|>", "```"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


class BareJson:
    """A parser that reads the whole answer, or its only fenced block, as one tool call. Any other text is content. It
    implements :class:`~headrace.rollout.answers.base.FramedParser`."""

    markers: tuple[str, ...] = (_TAG,)
    frame: tuple[str, str] = ("", "")

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the tool call that a complete answer consists of, with the text before a fenced block as content. If
        the answer is not a call, return the whole answer as content."""
        bare = text.strip().removeprefix(_TAG).strip()
        fenced = _FENCED.findall(text)
        before = "" if len(fenced) != 1 else text[: text.index(_FENCE)].rstrip()
        candidate = fenced[0].strip() if len(fenced) == 1 else bare
        if not (candidate.startswith("{") and '"name"' in candidate):
            return ParsedAnswer(content=text)
        call = read_call(candidate)
        if isinstance(call, str):
            return ParsedAnswer(content=text, problems=(call,))
        return ParsedAnswer(content=before, calls=(call,))

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Return how many characters are content whatever follows. The result is 0 if the whole answer may be a call.
        Otherwise it counts the characters before the first fenced block, or before text that may be the beginning of a
        block, without the white space at their end."""
        stripped = text.lstrip()
        if not begun and (stripped.startswith(("{", _TAG)) or _TAG.startswith(stripped)):
            return 0
        before, fenced, _ = text.partition(_FENCE)
        return len((before if fenced else before[: len(before) - overlap(before, _FENCE)]).rstrip())
