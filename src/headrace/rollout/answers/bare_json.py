"""An answer that is a JSON object with a name and arguments: Llama, and models whose template knows no calls."""

from __future__ import annotations

import re

from headrace.rollout.answers.base import Answer, read_call

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL)


class BareJson:
    """The whole answer, or the one fenced block in it, is a call; anything else is content."""

    markers: tuple[str, ...] = ("<|python_tag|>",)

    def __call__(self, text: str) -> Answer:
        bare = text.strip().removeprefix("<|python_tag|>").strip()
        fenced = _FENCED.findall(text)
        before = "" if len(fenced) != 1 else text[: text.index("```")].strip()
        candidate = fenced[0].strip() if len(fenced) == 1 else bare
        if not (candidate.startswith("{") and '"name"' in candidate):
            return Answer(content=text)
        call = read_call(candidate)
        if isinstance(call, str):
            return Answer(content=text, problems=(call,))
        return Answer(content=before, calls=(call,))
