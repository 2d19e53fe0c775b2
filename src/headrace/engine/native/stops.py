"""The search for stop strings: an answer ends with the token that completes one of its stop strings.

The text of an answer is the text of all its tokens decoded together, without replacement characters at its end, which
may stand for the first bytes of a character that the next token completes. Decoding the whole answer after every token
would cost more and more as the answer grows. Therefore only the latest tokens (the *window*) are decoded. The window is
shortened only if the text of all tokens ends with the text of the shortened window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.base.types.columns import IntColumn
from headrace.base.types.sampling import Sampling
from headrace.engine.native.masks import move_rows

_INCOMPLETE = "\ufffd"
"""The replacement character, to which the first bytes of an incomplete character decode."""
_WINDOW_MAX = 24
"""The length of the window, in tokens, at which it is shortened, if that is possible."""
_WINDOW_MIN = 8
"""The number of tokens that remain when the window is shortened: more than a character has bytes."""


@dataclass(slots=True, kw_only=True)
class _StopState:
    """The stop strings of the sequence in one row of the batch, and the end of its answer's text, in which they are
    searched."""

    strings: tuple[str, ...]
    tail: str = ""
    """The last characters of the text before the window: at most the length of the longest stop string minus 1."""
    window: list[int] = field(default_factory=list)
    """The ids of the latest tokens."""
    text: str = ""
    """The decoded text of the window."""
    given: int = 0
    """The number of characters at the start of ``tail + text`` that were sampled before the sequence joined the batch;
    0 for a new sequence. A stop string that ends within these characters is ignored."""


class Stops:
    """The stop strings of all rows. Rows without stop strings cost nothing.

    ``decode`` returns the exact text of token ids: with special tokens, if stop strings shall match them, and without
    cleaning up spaces, so that further ids only add text or complete a character at the end. The rows of the batch
    report their changes to it (see :class:`headrace.engine.native.rows.Follower`).

    >>> stops = Stops(lambda ids: "".join(map(chr, ids)))
    >>> stops.add(0, Sampling(max_new_tokens=9, stop=("end",)), np.zeros(0, np.int32), np.zeros(0, np.int32))
    >>> [stops.push(0, token) for token in b"bend"]
    [False, False, False, True]
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """Start without stop strings in any row. The argument is described at the class."""
        self._decode = decode
        self._rows: dict[int, _StopState] = {}
        """The stop strings and the end of the text, by row; only for rows that have stop strings."""

    def add(self, row: int, sampling: Sampling, prompt_ids_T: IntColumn, answer_ids_T: IntColumn) -> None:
        """Set up ``row`` for a sequence with the stop strings in ``sampling``. ``answer_ids_T`` are the tokens that it
        has sampled already: a stop string may begin among these tokens, but must end after them. The prompt is not
        used."""
        self._rows.pop(row, None)
        if sampling.stop:
            state = self._rows[row] = _StopState(strings=sampling.stop)
            for token in answer_ids_T.tolist():
                self.push(row, token)
            state.given = len(state.tail + state.text.rstrip(_INCOMPLETE))

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], count: int) -> None:
        """Move the rows ``sources`` to the indices ``targets``, after other rows have left; ``count`` rows are in use
        now."""
        move_rows(self._rows, sources, targets, count)

    def push(self, row: int, token: int) -> bool:
        """Append a token to ``row``. Return whether the text now contains a stop string that ends after the sequence
        joined."""
        state = self._rows.get(row)
        if state is None:
            return False
        state.window.append(token)
        text = self._decode(state.window)
        if text and text == state.text and not text.endswith(_INCOMPLETE):  # at the start: maybe a space, not shown yet
            state.window.pop()  # the token has no text of its own
            return False
        state.text = text
        final = state.tail + text.rstrip(_INCOMPLETE)
        ended = any(final.find(string, max(0, state.given - len(string) + 1)) >= 0 for string in state.strings)
        if len(state.window) >= _WINDOW_MAX:
            self._shorten(state)
        return ended

    def _shorten(self, state: _StopState) -> None:
        """Shorten the window and the tail to the last tokens and characters that are needed to find a stop string that
        the next token completes. Nothing changes if the text of the shortened window differs from the end of the
        text."""
        window = state.window[-_WINDOW_MIN:]
        text = self._decode(window)
        if state.text.endswith(text):
            needed = max(map(len, state.strings)) - 1
            before = state.tail + state.text[: len(state.text) - len(text)]
            num_removed = max(0, len(before) - needed)
            state.tail, state.given = before[num_removed:], max(0, state.given - num_removed)
            state.window, state.text = window, text
