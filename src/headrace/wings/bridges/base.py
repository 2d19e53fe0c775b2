"""What the bridges have in common: their names, the number of a task, and draws from global random states."""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.errors import EpisodeError
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import EpisodePolicy

Found = Callable[[], Env] | Callable[[Mapping[str, Any], EpisodePolicy], Awaitable[Any]]
"""What makes an environment for every episode, or an ``async def rollout(task, policy)``."""
Make = Callable[[str, dict[str, Any]], Found]
"""``make(what, options)``: every bridge has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """What is known of a bridge before its library is imported."""

    name: str
    """Of its file here, and in ``env.entry``."""
    package: str
    """What Python imports; empty where nothing is needed."""
    install: str
    """What pip is told."""
    example: str
    """An ``env.entry``."""
    names_file: bool = False
    """Whether what follows its name is a ``file.py:name`` of the user."""


BRIDGES = {
    bridge.name: bridge
    for bridge in (
        Bridge(
            name="reasoning_gym",
            package="reasoning_gym",
            install="'headrace[reasoning-gym]'",
            example="reasoning_gym/basic_arithmetic",
        ),
        Bridge(name="verifiers", package="verifiers", install="'headrace[verifiers]'", example="verifiers/my_taskset"),
        Bridge(name="trl", package="", install="", example="trl/my_env.py:MyEnv", names_file=True),
        Bridge(name="gem", package="gem", install="'headrace[gem]'", example="gem/game:GuessTheNumber-v0"),
        Bridge(
            name="textarena",
            package="textarena",
            install="'headrace[textarena]'",
            example="textarena/GuessTheNumber-v0",
        ),
        Bridge(
            name="openenv", package="openenv", install="'headrace[openenv]'", example="openenv/http://127.0.0.1:8000"
        ),
        Bridge(name="mcp", package="mcp", install="'headrace[mcp]'", example="mcp/python my_tools.py"),
    )
}
"""By name. Atropos is not among them: there the environments drive (:mod:`headrace.wings.bridges.atropos`)."""


def number_of(task: Mapping[str, Any]) -> int:
    """The number of a task among those that a library makes."""
    number = task.get("number")
    if not isinstance(number, int):
        raise EpisodeError(
            f"the row has no number (it has: {', '.join(task) or 'nothing'})",
            remedy='set data.count in place of data.path, or give rows like {"number": 7}',
        )
    return number


class OwnDraws:
    """The global random states of Python and numpy as one episode sees them, for games that draw from these.

    >>> one, other = OwnDraws(7), OwnDraws(7)
    >>> def draw(draws):
    ...     with draws.held():
    ...         return random.getrandbits(16)
    >>> [draw(one), draw(one)] == [draw(other), draw(other)]
    True
    """

    _LOCK = threading.Lock()

    def __init__(self, seed: int) -> None:
        seed %= 2**32
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the body's duration the states are this episode's; only one body at a time runs in a process."""
        with self._LOCK:
            random.setstate(self._python)
            np.random.set_state(self._numpy)  # noqa: NPY002 - as above
            try:
                yield
            finally:
                self._python = random.getstate()
                self._numpy = np.random.get_state()  # noqa: NPY002 - as above
