"""A parser for answers that are a JSON object with a name and arguments: Llama, and models whose template has no
tools."""

from __future__ import annotations

import re

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

_TAG, _FENCE = "<|python_tag|>", "```"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


class BareJson:
    """A parser that takes the whole answer, or its only fenced block, as a call; any other text is content."""

    markers: tuple[str, ...] = (_TAG,)

    def __call__(self, text: str) -> ParsedAnswer:
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

    def num_certain(self, text: str) -> int:
        """Return 0 for text that may be a call; else the length up to the first block, or its possible beginning,
        without the space before it."""
        stripped = text.lstrip()
        if stripped.startswith(("{", _TAG)) or _TAG.startswith(stripped):
            return 0
        before, fenced, _ = text.partition(_FENCE)
        return len((before if fenced else before[: len(before) - overlap(before, _FENCE)]).rstrip())
