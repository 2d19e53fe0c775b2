"""The bridge to the tasksets and environments of ``verifiers``: ``env.entry = "verifiers/TASKSET"``.

``env.options`` are the environment's own settings, as in the ``[env]`` section of verifiers: ``{agent = {harness = {id
= "null"}}, taskset = {split = "train"}}``. Any harness works: its model requests are directed to the endpoint of the
episode, and its tokens are trained exactly as they were sampled. The number of a dataset row is the index of the task
in the taskset.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import EpisodeError
from headrace.rollout.environments.bridges import Bridge, BridgedEnvironment
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges.base import task_number

_MODEL = "policy"
"""The model name that harnesses send; the endpoint accepts any name."""
_NO_VARIABLE = "HEADRACE_HAS_NO_API_KEY_HERE"
"""The name of an environment variable that does not exist, because the library's configuration must name one. Each
episode has its own API key, sent in a header instead."""


def make(what: str, options: dict[str, Any]) -> BridgedEnvironment:
    """Return a rollout function, which runs one episode of the environment of the taskset ``what``. ``options`` are
    ``env.options``: the settings of the environment."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset = {**options.pop("taskset", {}), "id": what}
    environment = load_environment(resolve_env_config({**options, "taskset": taskset}))
    tasks = Tasks(environment.taskset)

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Run one episode of the verifiers environment, and return its reward. The environment sends its model requests
        to the policy over HTTP."""
        client = EvalClientConfig(
            base_url=policy.base_url,
            api_key_var=_NO_VARIABLE,
            headers={"x-api-key": policy.api_key},
        )
        own = copy.copy(environment)  # ``serving`` stores this episode's servers on the object
        async with own.serving():
            ended = await own.run_episode(tasks[task_number(task)], ModelContext(model=_MODEL, client=client))
        return Episode(reward=_reward(ended))

    return rollout


class Tasks:
    """The tasks of a taskset by number. A task is loaded when it or a later task is first requested. The object is
    thread-safe."""

    def __init__(self, taskset: Any) -> None:
        """Create the tasks of ``taskset``, the library's collection of tasks, which is iterated once."""
        self._iterator = iter(taskset)
        """Yields the tasks that were not loaded yet."""
        self._loaded: list[Any] = []
        """The tasks that were loaded, by number."""
        self._lock = threading.Lock()
        """Held while a task is looked up or loaded."""

    def __getitem__(self, number: int) -> Any:
        """Return task ``number``, counted from 0. Raises :class:`~headrace.base.errors.EpisodeError` if the taskset has
        no such task."""
        with self._lock:
            self._loaded += itertools.islice(self._iterator, max(number + 1 - len(self._loaded), 0))
        if number >= len(self._loaded):
            raise EpisodeError(
                f"the row has number={number}, and the taskset has {len(self._loaded)} tasks",
                remedy=f"set data.count <= {len(self._loaded)}, held-out rows included",
            )
        return self._loaded[number]


def _reward(episode: Any) -> float:
    """Return the reward of ``episode``, which has ended: the mean reward of its trainable agents, usually one.

    Raises :class:`~headrace.base.errors.EpisodeError` if the episode failed or no agent is trainable.
    """
    errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
    if not episode.ok:
        words = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not say why"
        raise EpisodeError(f"verifiers: {words}", remedy="fix the taskset, its harness or its runtime")
    rewards = [float(trace.reward) for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        raise EpisodeError("verifiers: no agent of the episode is trainable", remedy="make one of them trainable")
    return sum(rewards) / len(rewards)


BRIDGE = Bridge(
    make=make,
    example="verifiers/my_taskset",
    package="verifiers",
    install="'headrace[verifiers]'",
)
