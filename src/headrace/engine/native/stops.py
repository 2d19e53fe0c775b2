"""Stop strings: an answer ends with the token that completes one of them.

The text of an answer is that of all its tokens decoded together, without the replacement characters at its end: they
may be the first bytes of a character that the next token completes. Decoding it anew after each token would cost more
with each; decoding the newest tokens is enough, as long as they decode to the end of what they decode to among the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.types.columns import IntColumn

_INCOMPLETE = "\ufffd"
_LONGEST = 24
"""Tokens that are decoded at once, as far as possible."""
_SHORTEST = 8
"""Tokens that stay: more than a character has bytes."""


@dataclass(slots=True, kw_only=True)
class _Row:
    strings: tuple[str, ...]
    tail: str = ""
    """The end of the text before the window: as much as the longest string may need."""
    window: list[int] = field(default_factory=list)
    text: str = ""
    """Of the window."""


class Stops:
    """The rows with stop strings; the others cost nothing.

    ``decode`` gives the text of ids as it is: special tokens included if strings shall match them, and no spaces
    cleaned up, so that more ids only ever add text, except to an incomplete character at the end.

    >>> stops = Stops(lambda ids: "".join(map(chr, ids)))
    >>> stops.join(0, ("end",))
    >>> [stops.push(0, token) for token in b"bend"]
    [False, False, False, True]
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._rows: dict[int, _Row] = {}

    def join(self, row: int, strings: Sequence[str], answer_ids_T: IntColumn | Sequence[int] = ()) -> None:
        """A sequence takes ``row``; ``answer_ids_T`` is what it has sampled before."""
        self._rows.pop(row, None)
        if strings:
            self._rows[row] = _Row(strings=tuple(strings))
            for token in answer_ids_T:
                self.push(row, int(token))

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], count: int) -> None:
        """Rows have left: those of ``sources`` take the places of ``targets``; ``count`` are in use now."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            moved = self._rows.pop(source, None)
            self._rows.pop(target, None)
            if moved:
                self._rows[target] = moved
        for row in [row for row in self._rows if row >= count]:
            del self._rows[row]

    def push(self, row: int, token: int) -> bool:
        """Append a token to ``row``; whether its text now holds one of the strings."""
        state = self._rows.get(row)
        if state is None:
            return False
        state.window.append(token)
        text = self._decode(state.window)
        if text == state.text and not text.endswith(_INCOMPLETE):
            state.window.pop()  # it has no text of its own
            return False
        state.text = text
        final = state.tail + text.rstrip(_INCOMPLETE)
        if any(string in final for string in state.strings):
            return True
        if len(state.window) >= _LONGEST:
            self._shorten(state)
        return False

    def push_all(self, ids_R: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Append a token to every row; the rows whose text now holds one of their strings."""
        ended_R = np.zeros(len(ids_R), bool)
        for row in self._rows:
            ended_R[row] = self.push(row, int(ids_R[row]))
        return ended_R

    def _shorten(self, state: _Row) -> None:
        window = state.window[-_SHORTEST:]
        text = self._decode(window)
        if state.text.endswith(text):
            needed = max(map(len, state.strings)) - 1
            before = state.tail + state.text[: len(state.text) - len(text)]
            state.tail = before[len(before) - needed :] if needed < len(before) else before
            state.window, state.text = window, text
