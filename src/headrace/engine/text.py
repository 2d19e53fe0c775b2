"""Incremental conversion of token ids to text, for answers that are shown while they are sampled.

A character may be spread over several tokens. Until its last token arrives, such a character would decode to U+FFFD, so
its tokens are kept *pending*. Text that may be the beginning of a stop string is kept pending as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BROKEN = "\ufffd"
"""The replacement character, to which the bytes of an incomplete character decode."""
MAX_HELD = 16
"""The most tokens that are pending as parts of one character. More tokens are decoded as broken text."""
SPLIT = 3
"""How many of the last tokens may be parts of an incomplete character, which has at most three bytes."""


class Decode(Protocol):
    """A function that returns the text of token ids, without special tokens."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """A converter of one answer, which returns the text that new tokens add. A character is returned only when all its
    tokens have arrived.

    >>> table = ["a", "b"]
    >>> detokenizer = Detokenizer(lambda ids: "".join(table[token] for token in ids))
    >>> detokenizer.push([0, 1]), detokenizer.push([1]), detokenizer.end()
    ('ab', 'b', '')
    """

    def __init__(self, decode: Decode) -> None:
        """Start an answer without tokens. ``decode`` returns the text of token ids."""
        self._decode = decode
        self._context: list[int] = []
        """The tokens whose text was returned last; the text of a token may depend on the token before it."""
        self._pending: list[int] = []
        """The tokens whose text has not been returned yet."""

    def push(self, ids: Sequence[int]) -> str:
        """Append the token ids ``ids``, and return the text that has become certain: it may be empty, or complete a
        character whose first tokens came earlier."""
        self._pending += ids
        for end in range(len(self._pending), max(0, len(self._pending) - SPLIT - 1), -1):
            text = self._text(end)
            if not text.endswith(BROKEN):
                return self._return_first(text, end)
        if len(self._pending) < MAX_HELD:
            return ""
        end = len(self._pending) - SPLIT
        return self._return_first(self._text(end), end)

    def end(self) -> str:
        """Return the text that is still pending when the answer ends: an incomplete character, decoded to U+FFFD."""
        return self._return_first(self._text(len(self._pending)), len(self._pending))

    def _text(self, end: int) -> str:
        """Return the text that the first ``end`` pending tokens add to the text already returned."""
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *self._pending[:end]])[len(before) :]

    def _return_first(self, text: str, end: int) -> str:
        """Remove the first ``end`` pending tokens, and return ``text``, to which they decode."""
        if text:  # else they are special tokens, which do not change the text of later tokens
            self._context = self._pending[:end]
        del self._pending[:end]
        return text


@dataclass(frozen=True, slots=True)
class Cut:
    """A piece of text that may be shown to the reader of an answer, as :class:`StopFinder` returns it."""

    text: str
    stopped: bool
    """Whether a stop string was completed; no text follows then."""


class StopFinder:
    """A filter that removes a stop string and the text after it. Text that may begin a stop string is kept pending.

    >>> finder = StopFinder(["END"])
    >>> [finder.push(text).text for text in ("one E", "N", "E")], finder.push("ND two")
    (['one ', '', 'EN'], Cut(text='', stopped=True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Start an answer without text. ``stops`` are the stop strings."""
        self._stops = stops
        self._pending = ""
        """The end of the text, which may be the beginning of a stop string and has not been returned."""

    def push(self, text: str) -> Cut:
        """Append ``text``, and return the text that may be shown now: the text before the first stop string, if one is
        complete, else everything that cannot be the beginning of one."""
        self._pending += text
        found = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if found:
            shown, self._pending = self._pending[: min(found)], ""
            return Cut(shown, True)
        keep = max((overlap(self._pending, stop) for stop in self._stops), default=0)
        shown = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(shown) :]
        return Cut(shown, False)

    def last(self, cut: Cut) -> Cut:
        """Return the text of ``cut`` followed by the pending text, which begins no stop string because the answer has
        ended."""
        text, self._pending = cut.text + self._pending, ""
        return Cut(text, False)


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are a beginning of the stop string ``stop``, but not all of it;
    0 if none are."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
