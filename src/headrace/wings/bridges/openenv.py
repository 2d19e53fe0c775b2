"""Environments behind an OpenEnv server: ``env.entry = "openenv/http://127.0.0.1:8000"``.

Every episode is a session of its own. Actions and observations of OpenEnv are records; ``env.options`` say what of them
is text:

action          the field of the action that holds the model's answer; its other fields stand in ``with``
observation     the field of an observation that the model reads; unset: all of it, as JSON
with            fields of every action, such as {language = "python"}
reset           what reset is told, beside the seed, which is the row's number
timeout_s       longest wait for the server (60)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.chat import Message
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import Found, number_of

_KNOWN = {"action": "message", "observation": "", "with": {}, "reset": {}, "timeout_s": 60.0}


def make(what: str, options: dict[str, Any]) -> Found:
    """The environment of the server ``what``."""
    from openenv.core import GenericEnvClient

    strange = options.keys() - _KNOWN.keys()
    if strange:
        raise EnvError(f"env.options.{min(strange)} is unknown", remedy=f"known are {', '.join(_KNOWN)}")
    client = partial(GenericEnvClient, base_url=what, message_timeout_s=float(options.get("timeout_s", 60.0)))
    return partial(OpenEnvSession, client, {**_KNOWN, **options})


class OpenEnvSession(Env):
    """One session of the server."""

    def __init__(self, make_client: Callable[[], Any], options: Mapping[str, Any]) -> None:
        self._client = make_client()
        self._options = options

    async def reset(self, task: Task) -> str:
        """The first observation."""
        await self._client.connect()
        begun = await self._client.reset(seed=number_of(task), **self._options["reset"])
        return self._as_text(begun.observation)

    async def step(self, message: Message) -> StepResult:
        """What the server makes of an answer."""
        action = {**self._options["with"], self._options["action"]: message.content}
        done = await self._client.step(action)
        return StepResult(
            messages=() if done.done else self._as_text(done.observation), reward=done.reward, done=bool(done.done)
        )

    async def close(self) -> None:
        """Ends the session."""
        await self._client.close()

    def _as_text(self, observation: Mapping[str, Any]) -> str:
        field = self._options["observation"]
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise EpisodeError(
                f"the observation has no field {field!r} (it has: {', '.join(observation)})",
                remedy="name one of them in env.options.observation",
            )
        return str(observation[field])
