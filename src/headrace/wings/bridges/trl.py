"""Environments written for TRL's ``environment_factory``: ``env.entry = "trl/my_env.py:MyEnv"``.

The class is what TRL asks for: ``reset(**row)``, whose text joins the prompt; public methods, which are tools; and
``get_reward()``, if it knows what was earned. A reward function written for TRL needs no bridge:
``env.reward = "my_rewards.py:reward"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from headrace.base.config.user_code import find_in_file, load_file
from headrace.base.errors import EnvError
from headrace.base.types.chat import Message
from headrace.rollout.environments.interface import Env, StepResult, Task, as_messages
from headrace.wings.bridges.base import Found

_NO_TOOLS = ("reset", "get_reward")


def make(what: str, options: dict[str, Any]) -> Found:
    """The class or factory ``file.py:name``; ``options`` are its arguments."""
    path, name = find_in_file(what, "env.entry")
    factory = partial(vars(load_file(path))[name], **options)
    if not callable(getattr(factory(), "reset", None)):  # gate: getattr - an object of the user's, made for TRL
        raise EnvError(f"env.entry='trl/{what}' makes objects without reset", remedy="write def reset(self, **row)")
    return partial(Factory, factory)


class Factory(Env):
    """One object of the factory, one episode."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._made = factory()
        methods = inspect.getmembers(type(self._made), inspect.isfunction)
        self.tools = [
            getattr(self._made, name) for name, _ in methods if name not in _NO_TOOLS and not name.startswith("_")
        ]

    def reset(self, task: Task) -> list[Message]:
        """The prompt of the row, and what the environment adds to it."""
        said = list(as_messages(task.get("prompt", ())))
        added = self._made.reset(**task)
        if added is None:
            return said
        asked = said.pop().content if said and said[-1].role == "user" else ""
        return [*said, Message(role="user", content=asked + str(added))]

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """An answer without calls ends the episode."""
        get_reward = getattr(self._made, "get_reward", None)  # gate: getattr - as TRL looks for it
        earned = None if get_reward is None else get_reward()
        return _ended(earned) if inspect.isawaitable(earned) else StepResult(reward=earned, done=True)


async def _ended(earned: Awaitable[float]) -> StepResult:
    return StepResult(reward=await earned, done=True)
