"""A parser of tool calls."""

from __future__ import annotations

from headrace.rollout.answers.base import ParsedAnswer


class Shout:
    """A line ``CALL name`` is a call without arguments."""

    markers = ()

    def __call__(self, text: str) -> ParsedAnswer:
        """Take the text apart."""
        lines = text.split("\n")
        calls = tuple((line.removeprefix("CALL "), "{}") for line in lines if line.startswith("CALL "))
        return ParsedAnswer(content="\n".join(line for line in lines if not line.startswith("CALL ")), calls=calls)

    def num_certain(self, text: str, *, begun: bool = False) -> int:
        """Nothing is certain before the end."""
        return 0
