"""The bridge to the library ``gem-llm``, for every game or task that is registered with the library:
``env.entry = "gem/game:GuessTheNumber-v0"``.

``env.options`` are the keyword arguments of ``gem.make``. The number of a dataset row is the seed of the row's game.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.types.chat import Message
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import EpisodeRandom, task_number


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a factory of environments, one for each episode, for the game or task with the name ``what`` in gem and
    the keyword arguments ``options``. A run calls this function with the part of ``env.entry`` after the slash, and
    with ``env.options``."""
    import gem

    game = partial(gem.make, what, **options)
    game()  # raises now, rather than in the first episode, if gem rejects the name or an option
    return partial(Game, game)


class Game(Env):
    """An environment that plays one episode of a game of gem."""

    def __init__(self, make_game: Callable[[], Any]) -> None:
        """Create the environment. ``make_game`` returns a new game; :meth:`reset` calls it."""
        self._make = make_game
        self._game: Any = None
        """The game in progress; ``None`` before the first :meth:`reset`."""
        self._random = EpisodeRandom(0)
        """State of the global random generators for this episode."""

    def reset(self, task: Task) -> str:
        """Start a new game with the number of the dataset row ``task`` as its seed, and return its first observation as
        text."""
        number = task_number(task)
        self._random = EpisodeRandom(number)
        with self._random.active():
            self._game = self._make()
            return _as_text(*self._game.reset(seed=number))

    def step(self, message: Message) -> StepResult:
        """Execute the model's message as an action of the game, and return the observation as text, the reward, and
        whether the game is over."""
        with self._random.active():
            observation, reward, terminated, truncated, info = self._game.step(message.content)
        done = bool(terminated or truncated)
        return StepResult(messages=() if done else _as_text(observation, info), reward=float(reward), done=done)


def _as_text(observation: str, info: Mapping[str, Any]) -> str:
    """Return the observation, followed by ``info["suffix"]``, a reminder that some games repeat at every step."""
    return "\n".join(filter(None, (observation, info.get("suffix"))))


BRIDGE = Bridge(
    make=make,
    example="gem/game:GuessTheNumber-v0",
    package="gem",
    install="'headrace[gem]'",
)
