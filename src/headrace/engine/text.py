"""From token ids to text, piece by piece.

A character may be spread over several tokens; until its last one is there it would decode to U+FFFD, so it is held
back. So is text that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BROKEN = "\ufffd"
MAX_HELD = 16
"""Tokens that are held back as parts of one character at most: beyond, they are broken text, and are shown as such."""
SPLIT = 3
"""The last tokens that may be parts of an incomplete character: it has up to three bytes."""


class Decode(Protocol):
    """The text of token ids, special tokens left out."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """The text that each token adds.

    >>> table = ["a", "b"]
    >>> detokenizer = Detokenizer(lambda ids: "".join(table[token] for token in ids))
    >>> detokenizer.push([0, 1]), detokenizer.push([1]), detokenizer.end()
    ('ab', 'b', '')
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []  # what was shown last: how a token decodes may depend on the one before
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._held += ids
        for end in range(len(self._held), max(0, len(self._held) - SPLIT - 1), -1):
            text = self._text(end)
            if not text.endswith(BROKEN):
                return self._show(text, end)
        if len(self._held) < MAX_HELD:
            return ""
        end = len(self._held) - SPLIT
        return self._show(self._text(end), end)

    def end(self) -> str:
        """What was held back: an incomplete character, as U+FFFD."""
        return self._show(self._text(len(self._held)), len(self._held))

    def _text(self, end: int) -> str:
        """What the first ``end`` held tokens add."""
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *self._held[:end]])[len(before) :]

    def _show(self, text: str, end: int) -> str:
        if text:  # else they are special tokens, which change nothing of what follows
            self._context = self._held[:end]
        del self._held[:end]
        return text


@dataclass(frozen=True, slots=True)
class Cut:
    """What may be shown."""

    text: str
    stopped: bool
    """Whether a stop string was completed; nothing follows."""


class StopFinder:
    """Holds text back as long as it may begin a stop string.

    >>> finder = StopFinder(["END"])
    >>> [finder.push(text).text for text in ("one E", "N", "E")], finder.push("ND two")
    (['one ', '', 'EN'], Cut(text='', stopped=True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> Cut:
        """Text that arrives, to text that may be shown."""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return Cut(shown, True)
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return Cut(shown, False)

    def last(self, cut: Cut) -> Cut:
        """``cut`` and what was held back, now that nothing follows."""
        text, self._held = cut.text + self._held, ""
        return Cut(text, False)


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
