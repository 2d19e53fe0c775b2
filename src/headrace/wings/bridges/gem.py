"""Games and tasks of ``gem-llm``, or of anything registered with it: ``env.entry = "gem/game:GuessTheNumber-v0"``.

``env.options`` are what ``gem.make`` takes beside the name. The number of a row is the seed of its game.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.types.chat import Message
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import Found, OwnDraws, number_of


def make(what: str, options: dict[str, Any]) -> Found:
    """The environment ``what``: gymnasium's ``reset`` and ``step`` over text."""
    import gem

    game = partial(gem.make, what, **options)
    game()  # what it refuses is known now
    return partial(Game, game)


class Game(Env):
    """One game."""

    def __init__(self, make_game: Callable[[], Any]) -> None:
        self._make = make_game
        self._game: Any = None
        self._draws = OwnDraws(0)

    def reset(self, task: Task) -> str:
        """The first observation."""
        number = number_of(task)
        self._draws = OwnDraws(number)
        with self._draws.held():
            self._game = self._make()
            return _as_text(*self._game.reset(seed=number))

    def step(self, message: Message) -> StepResult:
        """What follows an action; a reward for every one."""
        with self._draws.held():
            observation, reward, terminated, truncated, info = self._game.step(message.content)
        done = bool(terminated or truncated)
        return StepResult(messages=() if done else _as_text(observation, info), reward=float(reward), done=done)


def _as_text(observation: str, info: Mapping[str, Any]) -> str:
    """What the game says, and what it wants to be reminded of each time."""
    return "\n".join(filter(None, (observation, info.get("suffix"))))
