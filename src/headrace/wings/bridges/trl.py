"""The bridge to environments written for TRL's ``environment_factory``: ``env.entry = "trl/my_env.py:MyEnv"``.

The class follows TRL's interface: ``reset(**row)``, whose returned text is appended to the prompt; public methods,
which are tools; and an optional ``get_reward()``. A reward function written for TRL needs no bridge: ``env.reward =
"my_rewards.py:reward"``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from headrace.base.config.user_code import find_in_file, load_file
from headrace.base.errors import EnvError
from headrace.base.types.chat import Message
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.interface import Env, StepResult, Task, as_messages

_NOT_TOOLS = ("reset", "get_reward")


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a factory of environments, one for each episode, for the class or factory function ``what``
    (``file.py:name``), which is called with ``options``. Raises :class:`~headrace.base.errors.EnvError` if the created
    object has no ``reset``."""
    path, name = find_in_file(what, "env.entry")
    factory = partial(vars(load_file(path))[name], **options)
    if not callable(getattr(factory(), "reset", None)):  # gate: getattr - an object of the user's, made for TRL
        raise EnvError(f"env.entry='trl/{what}' makes objects without reset", remedy="write def reset(self, **row)")
    return partial(TrlEpisode, factory)


class TrlEpisode(Env):
    """An environment for one episode with an object of a class written for TRL. The public methods of the object are
    the model's tools."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        """Create the environment. ``factory`` returns a new object of the user's class."""
        self._environment = factory()
        """The object of the user's class."""
        methods = inspect.getmembers(type(self._environment), inspect.isfunction)
        names = [name for name, _ in methods if name not in _NOT_TOOLS and not name.startswith("_")]
        self.tools = [getattr(self._environment, name) for name in names]

    def reset(self, task: Task) -> list[Message]:
        """Return the prompt of the dataset row ``task`` as messages. The text that the object's ``reset`` returns is
        appended to the last user message."""
        messages = list(as_messages(task.get("prompt", ())))
        added = self._environment.reset(**task)
        if added is None:
            return messages
        prompt = messages.pop().content if messages and messages[-1].role == "user" else ""
        return [*messages, Message(role="user", content=prompt + str(added))]

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """End the episode after the answer ``message``, with the reward of ``get_reward()`` if the object has that
        method, and otherwise without a reward. The run executes tool calls itself, and calls this method with the first
        answer without calls."""
        get_reward = getattr(self._environment, "get_reward", None)  # gate: getattr - as TRL looks for it
        reward = None if get_reward is None else get_reward()
        return _end_with(reward) if inspect.isawaitable(reward) else StepResult(reward=reward, done=True)


async def _end_with(reward: Awaitable[float]) -> StepResult:
    """Wait for the ``reward``, and return the result that ends the episode with it."""
    return StepResult(reward=await reward, done=True)


BRIDGE = Bridge(
    make=make,
    example="trl/my_env.py:MyEnv",
    names_file=True,
)
