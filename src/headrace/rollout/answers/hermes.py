"""A parser for ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen and many others."""

from __future__ import annotations

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """A parser that takes the text between the tags as calls, any number of them; the rest is content."""

    markers: tuple[str, ...] = (BEGIN, END)

    def __call__(self, text: str) -> ParsedAnswer:
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

    def num_certain(self, text: str) -> int:
        """Return the length up to the first tag, or its possible beginning, without the space before it."""
        before, found, _ = text.partition(BEGIN)
        return len((before if found else before[: len(before) - overlap(before, BEGIN)]).rstrip())
