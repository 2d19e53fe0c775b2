"""The ways in which models write tool calls, with one parser for each.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>      Hermes, Qwen and many others
json     {"name": ..., "arguments": {...}}                             Llama, and models without tools in the template
"""

from __future__ import annotations

import re

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """A parser that reads every text between the tags as a tool call; the rest is content (see
    :class:`~headrace.rollout.answers.base.FramedParser`)."""

    markers: tuple[str, ...] = (BEGIN, END)
    frame: tuple[str, str] = (BEGIN, END)

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the content of a whole answer and its calls. A call that is invalid, or has no closing tag, stays in
        the content and is described among the problems."""
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
        """Return how many characters are content however the answer goes on: those before the first tag, or before what
        may be the beginning of one, without the white space at their end."""
        before, found, _ = text.partition(BEGIN)
        return len((before if found else before[: len(before) - overlap(before, BEGIN)]).rstrip())


_TAG, _FENCE = "<|python_tag|>", "```"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


class BareJson:
    """A parser that reads the whole answer, or its only fenced block, as a tool call; any other text is content (see
    :class:`~headrace.rollout.answers.base.FramedParser`)."""

    markers: tuple[str, ...] = (_TAG,)
    frame: tuple[str, str] = ("", "")

    def __call__(self, text: str) -> ParsedAnswer:
        """Return the call that a whole answer is, with the text before its fenced block as content; otherwise the
        answer as content."""
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
        """Return how many characters are content however the answer goes on: none if the whole answer may be a call,
        otherwise those before the first fenced block, or before what may be the beginning of one, without the white
        space at their end."""
        stripped = text.lstrip()
        if not begun and (stripped.startswith(("{", _TAG)) or _TAG.startswith(stripped)):
            return 0
        before, fenced, _ = text.partition(_FENCE)
        return len((before if fenced else before[: len(before) - overlap(before, _FENCE)]).rstrip())
