"""Helpers that several bridges share: the task number of a dataset row, and a random state for each episode."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from headrace.base.errors import EpisodeError


def task_number(task: Mapping[str, Any]) -> int:
    """Return the field ``number`` of the dataset row ``task``, which selects a task of the library.

    Raises :class:`~headrace.base.errors.EpisodeError` if the row has no integer ``number``.
    """
    number = task.get("number")
    if not isinstance(number, int):
        raise EpisodeError(
            f"the row has no number (it has: {', '.join(task) or 'nothing'})",
            remedy='set data.count in place of data.path, or give rows like {"number": 7}',
        )
    return number


class EpisodeRandom:
    """The state of Python's and NumPy's global random generators for one episode, for games that use these generators.

    >>> one, other = EpisodeRandom(7), EpisodeRandom(7)
    >>> def draw(state):
    ...     with state.active():
    ...         return random.getrandbits(16)
    >>> [draw(one), draw(one)] == [draw(other), draw(other)]
    True
    """

    _LOCK = threading.Lock()

    def __init__(self, seed: int) -> None:
        """Create the states of both generators after they are seeded with ``seed``."""
        seed %= 2**32
        self._python = random.Random(seed).getstate()
        """State of Python's generator."""
        self._numpy = np.random.RandomState(seed).get_state()
        """State of NumPy's generator."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set the global generators to this episode's states while the body runs, and save the states afterwards. A
        lock of the process allows only one body to run at a time."""
        with self._LOCK:
            random.setstate(self._python)
            np.random.set_state(self._numpy)  # noqa: NPY002 - the game uses the global generator
            try:
                yield
            finally:
                self._python = random.getstate()
                self._numpy = np.random.get_state()  # noqa: NPY002 - the game uses the global generator
