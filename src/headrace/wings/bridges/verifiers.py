"""Tasksets and environments of ``verifiers``: ``env.entry = "verifiers/TASKSET"``.

``env.options`` are the environment's own settings, as in the ``[env]`` of verifiers:
``{agent = {harness = {id = "null"}}, taskset = {split = "train"}}``. The harness, whichever it is, is pointed at this
episode; its tokens are trained as they were sampled. The number of a row is that of the task in the taskset.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Mapping
from typing import Any

from headrace.base.errors import EpisodeError
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bridges.base import Found, number_of

_MODEL = "policy"
"""What harnesses call the model; the endpoint takes any name."""
_NO_VARIABLE = "HEADRACE_HAS_NO_API_KEY_HERE"
"""Keys are those of episodes, so they stand in a header, and in no environment variable."""


def make(what: str, options: dict[str, Any]) -> Found:
    """The taskset ``what`` with the environment that it asks for."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset = {**options.pop("taskset", {}), "id": what}
    environment = load_environment(resolve_env_config({**options, "taskset": taskset}))
    tasks = Tasks(environment.taskset)

    async def rollout(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        client = EvalClientConfig(
            base_url=policy.base_url,
            api_key_var=_NO_VARIABLE,
            headers={"x-api-key": policy.api_key},
        )
        mine = copy.copy(environment)  # its servers are those of this episode
        async with mine.serving():
            ended = await mine.run_episode(tasks[number_of(task)], ModelContext(model=_MODEL, client=client))
        return Episode(reward=_earned(ended))

    return rollout


class Tasks:
    """The tasks of a taskset by number; they are loaded as far as they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self._coming = iter(taskset)
        self._loaded: list[Any] = []
        self._lock = threading.Lock()

    def __getitem__(self, number: int) -> Any:
        with self._lock:
            self._loaded += itertools.islice(self._coming, max(number + 1 - len(self._loaded), 0))
        if number >= len(self._loaded):
            raise EpisodeError(
                f"the row has number={number}, and the taskset has {len(self._loaded)} tasks",
                remedy=f"set data.count <= {len(self._loaded)}, held-out rows included",
            )
        return self._loaded[number]


def _earned(ended: Any) -> float:
    """Of the one agent under training; the mean where there are several."""
    errors = [error for trace in ended.traces for error in trace.errors] + list(ended.errors)
    if not ended.ok:
        words = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not say why"
        raise EpisodeError(f"verifiers: {words}", remedy="mend the taskset, its harness or its runtime")
    earned = [float(trace.reward) for trace in ended.traces if trace.agent.trainable]
    if not earned:
        raise EpisodeError("verifiers: no agent of the episode is trainable", remedy="make one of them trainable")
    return sum(earned) / len(earned)
