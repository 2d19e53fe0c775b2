"""An answer that is a JSON object with a name and arguments: Llama, and models whose template knows no calls."""

from __future__ import annotations

import re

from headrace.engine.text import overlap
from headrace.rollout.answers.base import ParsedAnswer, read_call

_TAG, _FENCE = "<|python_tag|>", "```"
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


class BareJson:
    """The whole answer, or the one fenced block in it, is a call; anything else is content."""

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
        """Nothing of what may be a call; else up to the first block, or what may become one, and the space before
        it."""
        begun = text.lstrip()
        if begun.startswith(("{", _TAG)) or _TAG.startswith(begun):
            return 0
        before, fenced, _ = text.partition(_FENCE)
        return len((before if fenced else before[: len(before) - overlap(before, _FENCE)]).rstrip())
