"""Incremental conversion of token ids to text.

A character may be spread over several tokens. Until its last token has arrived it would decode to U+FFFD, so it is held
back. Text that may be the beginning of a stop string is held back as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BROKEN = "\ufffd"
MAX_HELD = 16
"""The most tokens that are held back as parts of one character. Beyond that the text is broken, and is shown as
such."""
SPLIT = 3
"""How many of the last tokens may be parts of an incomplete character, which has at most three bytes."""


class Decode(Protocol):
    """A function that returns the text of token ids, without special tokens."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """A converter that returns the text which new tokens add.

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
        """Append tokens, and return the text that has become certain."""
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
        """Return the text held back: an incomplete character, as U+FFFD."""
        return self._show(self._text(len(self._held)), len(self._held))

    def _text(self, end: int) -> str:
        """Return the text that the first ``end`` held tokens add."""
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *self._held[:end]])[len(before) :]

    def _show(self, text: str, end: int) -> str:
        """Remove the first ``end`` of the tokens that were held back, and return ``text``, which they decode to."""
        if text:  # else they are special tokens, which change nothing of what follows
            self._context = self._held[:end]
        del self._held[:end]
        return text


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of text that may be shown."""

    text: str
    stopped: bool
    """Whether a stop string was completed; no text follows then."""


class StopFinder:
    """A filter that removes a stop string and the text after it; it holds text back while it may begin a stop string.

    >>> finder = StopFinder(["END"])
    >>> [finder.push(text).text for text in ("one E", "N", "E")], finder.push("ND two")
    (['one ', '', 'EN'], Cut(text='', stopped=True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> Cut:
        """Append text, and return the text that may be shown."""
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
        """Return ``cut`` followed by the text held back, for the end of an answer."""
        text, self._held = cut.text + self._held, ""
        return Cut(text, False)


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
