"""Stop strings: an answer ends with the token that completes one of them.

The text of an answer is that of all its tokens decoded together, without replacement characters at its end, which may
stand for the first bytes of a character that the next token completes. Decoding the whole answer after every token
would cost more and more as the answer grows. It is enough to decode the latest tokens, as long as the text of all
tokens ends with theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import IntColumn
from headrace.base.types.sampling import Sampling

_INCOMPLETE = "\ufffd"
"""The replacement character, to which the first bytes of an incomplete character decode."""
_LONGEST = 24
"""The number of newest tokens that are decoded at once, as far as possible."""
_SHORTEST = 8
"""The number of tokens that stay when the window is shortened: more than a character has bytes."""


@dataclass(slots=True, kw_only=True)
class _StopState:
    """The stop strings of the sequence in one row of the batch, and the end of its answer's text, in which they are
    searched. The *window* is the latest tokens, which are decoded together."""

    strings: tuple[str, ...]
    tail: str = ""
    """The last characters of the text before the window, at most one fewer than the longest stop string has."""
    window: list[int] = field(default_factory=list)
    """The ids of the latest tokens."""
    text: str = ""
    """The decoded text of the window."""
    given: int = 0
    """How many characters at the start of ``tail`` and ``text`` were sampled before the sequence joined the batch; 0
    for a new sequence. A stop string that ends within these characters is ignored."""


class Stops:
    """The stop strings of all rows. Rows without stop strings cost nothing.

    ``decode`` returns the exact text of ids: with special tokens if strings shall match them, and without cleaning up
    spaces, so that more ids only ever add text, except to an incomplete character at the end.

    >>> stops = Stops(lambda ids: "".join(map(chr, ids)))
    >>> stops.join(0, ("end",))
    >>> [stops.push(0, token) for token in b"bend"]
    [False, False, False, True]
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._rows: dict[int, _StopState] = {}

    def join(self, row: int, strings: Sequence[str], answer_ids_T: IntColumn | Sequence[int] = ()) -> None:
        """Set up ``row`` for a new sequence. ``answer_ids_T`` are the tokens that it has sampled before: a stop string
        may begin among them, but not end."""
        self._rows.pop(row, None)
        if strings:
            state = self._rows[row] = _StopState(strings=tuple(strings))
            for token in answer_ids_T:
                self.push(row, int(token))
            state.given = len(state.tail + state.text.rstrip(_INCOMPLETE))

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], count: int) -> None:
        """Move the rows ``sources`` to the places ``targets``, after rows have left; ``count`` rows are in use now."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            moved = self._rows.pop(source, None)
            self._rows.pop(target, None)
            if moved:
                self._rows[target] = moved
        for row in [row for row in self._rows if row >= count]:
            del self._rows[row]

    def push(self, row: int, token: int) -> bool:
        """Append a token to ``row``. Return whether a stop string now ends in the text since the sequence joined."""
        state = self._rows.get(row)
        if state is None:
            return False
        state.window.append(token)
        text = self._decode(state.window)
        if text and text == state.text and not text.endswith(_INCOMPLETE):  # at the start: maybe a space, not shown yet
            state.window.pop()  # it has no text of its own
            return False
        state.text = text
        final = state.tail + text.rstrip(_INCOMPLETE)
        ended = any(final.find(string, max(0, state.given - len(string) + 1)) >= 0 for string in state.strings)
        if len(state.window) >= _LONGEST:
            self._shorten(state)
        return ended

    def _shorten(self, state: _StopState) -> None:
        """Keep only as many of the last tokens and characters as are needed to find a stop string that the next token
        completes."""
        window = state.window[-_SHORTEST:]
        text = self._decode(window)
        if state.text.endswith(text):
            needed = max(map(len, state.strings)) - 1
            before = state.tail + state.text[: len(state.text) - len(text)]
            cut = max(0, len(before) - needed)
            state.tail, state.given = before[cut:], max(0, state.given - cut)
            state.window, state.text = window, text


class StopsFollower:
    """The adapter of :class:`Stops` to the interface through which the rows of the batch report their changes
    (:class:`headrace.engine.native.rows.Follower`)."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self.move, self.push = stops.move, stops.push

    def join(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up the stop strings of ``row`` for a new sequence that has sampled ``answer_ids_T`` before."""
        self._stops.join(row, sampling.stop, answer_ids_T)
