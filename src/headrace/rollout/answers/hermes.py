"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen and many others."""

from __future__ import annotations

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """Calls between tags, as many as the model likes; what is outside is content."""

    markers: tuple[str, ...] = (BEGIN, END)

    def __call__(self, text: str) -> ParsedAnswer:
        calls: list[tuple[str, str]] = []
        problems: list[str] = []
        said, *blocks = text.split(BEGIN)
        for block in blocks:
            inside, ended, after = block.partition(END)
            call = read_call(inside) if ended else "a call without an end"
            if isinstance(call, str):
                problems.append(call)
                said += BEGIN + block
                continue
            calls.append(call)
            said += after
        content = said.rstrip() if calls else text
        return ParsedAnswer(content=content, calls=tuple(calls), problems=tuple(problems))

    def num_certain(self, text: str) -> int:
        """Up to the first tag, or what may become one, and the space before it."""
        before, begun, _ = text.partition(BEGIN)
        return len((before if begun else before[: len(before) - overlap(before, BEGIN)]).rstrip())
