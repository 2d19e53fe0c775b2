"""The bridge to environments behind an OpenEnv server: ``env.entry = "openenv/http://127.0.0.1:8000"``.

Every episode is a separate session of the server. Actions and observations of OpenEnv are records; ``env.options``
define how they are converted from and to text:

    action          name of the action's field that holds the model's answer ("message")
    observation     name of the observation's field that the model reads; unset: the whole observation as JSON
    with            constant fields of every action, such as {language = "python"}
    reset           arguments of ``reset`` in addition to the seed, which is the row's number
    timeout_s       longest wait for the server, in seconds (60)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.base.errors import EnvError, EpisodeError
from headrace.base.types.chat import Message
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.interface import Env, StepResult, Task
from headrace.wings.bridges.base import task_number

_DEFAULTS = {"action": "message", "observation": "", "with": {}, "reset": {}, "timeout_s": 60.0}


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a factory of environments, one for each episode; an environment is a session with the server at the URL
    ``what``. ``options`` are ``env.options``. Raises :class:`~headrace.base.errors.EnvError` for an unknown option."""
    from openenv.core import GenericEnvClient

    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise EnvError(f"env.options.{min(unknown)} is unknown", remedy=f"known are {', '.join(_DEFAULTS)}")
    client = partial(GenericEnvClient, base_url=what, message_timeout_s=float(options.get("timeout_s", 60.0)))
    return partial(OpenEnvSession, client, {**_DEFAULTS, **options})


class OpenEnvSession(Env):
    """An environment for one episode, which is a session with the OpenEnv server."""

    def __init__(self, make_client: Callable[[], Any], options: Mapping[str, Any]) -> None:
        """Create the environment. ``make_client`` returns a client of the server that is not connected yet; ``options``
        are ``env.options``, defaults included."""
        self._client = make_client()
        """The client of the server, connected from :meth:`reset` to :meth:`close`."""
        self._options = options

    async def reset(self, task: Task) -> str:
        """Open the session, reset the environment with the number of the dataset row ``task`` as its seed, and return
        the first observation as text."""
        await self._client.connect()
        first = await self._client.reset(seed=task_number(task), **self._options["reset"])
        return self._as_text(first.observation)

    async def step(self, message: Message) -> StepResult:
        """Send the model's answer ``message`` as an action, and return the server's observation as text, its reward,
        and whether the episode is done."""
        action = {**self._options["with"], self._options["action"]: message.content}
        result = await self._client.step(action)
        return StepResult(
            messages=() if result.done else self._as_text(result.observation),
            reward=result.reward,
            done=bool(result.done),
        )

    async def close(self) -> None:
        """End the session. A run calls this once at the end of every episode."""
        await self._client.close()

    def _as_text(self, observation: Mapping[str, Any]) -> str:
        """Return an observation as text: the field that ``env.options.observation`` names, or the whole observation as
        JSON. Raises :class:`~headrace.base.errors.EpisodeError` if the observation lacks that field."""
        field = self._options["observation"]
        if not field:
            return json.dumps(observation, ensure_ascii=False)
        if field not in observation:
            raise EpisodeError(
                f"the observation has no field {field!r} (it has: {', '.join(observation)})",
                remedy="name one of them in env.options.observation",
            )
        return str(observation[field])


BRIDGE = Bridge(
    make=make,
    example="openenv/http://127.0.0.1:8000",
    package="openenv",
    install="'headrace[openenv]'",
)
