"""The rollout that an environment worker runs in a *trial*, the check of an environment before a run. It calls the
user's environment and observes it from inside the process. A script answers in place of a model.

Because it is a rollout, problems of the user's code are reported in the same way as in a run. Observations that only
this process can make are sent to the check as a message to the agent
:data:`~headrace.rollout.environments.scripted.REPORT`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
import numpy as np

from headrace.base.clock import RealClock, being_cancelled
from headrace.base.config.user_code import where
from headrace.base.errors import EpisodeError, HeadraceError
from headrace.base.tasks import first_error
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.environments.bridges import load_environment
from headrace.rollout.environments.entry import Rollout, load_entry
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.registry import ENVIRONMENTS
from headrace.rollout.environments.scripted import REPORT
from headrace.rollout.scoring.reward import RewardFunction, load_reward

UNUSABLE = "unusable"
"""The failure reason of an attempt whose file, or the object that it names, cannot be used."""
CHECK_S = 0.01
"""Seconds between two measurements of the delay of the event loop."""


class TrialReport(msgspec.Struct, kw_only=True):
    """The observations of one attempt that only the worker process can make. They are sent to the check as JSON."""

    load_s: float = 0.0
    """Seconds that the import of the file took; nearly 0 if it was imported before."""
    lag_s: float = 0.0
    """The longest time for which user code blocked the event loop, in seconds."""
    uncopyable: list[str] = []
    """The attributes of the environment that cannot be copied, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadedEnvironment:
    """The user's environment after its file was imported."""

    rollout: Rollout
    """The function that runs one episode of the environment."""
    uncopyable: list[str] = field(default_factory=list)
    """Descriptions of attributes that could not be copied. Each episode appends its own when it ends."""


async def trial(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """Make one attempt at ``task["row"]`` with the environment that ``task["kind"]``, ``task["entry"]`` and
    ``task["options"]`` name. Send a :class:`TrialReport` to the check, and return the ended episode. Raises
    :class:`~headrace.base.errors.EpisodeError` if the attempt has failed or the environment cannot be used."""
    clock, report = RealClock(), TrialReport()
    kind, entry = task["kind"], task["entry"]
    start_s = clock.now()
    result: Episode | EpisodeError
    try:
        loaded = await asyncio.to_thread(_load, kind, entry, json.dumps(task["options"]))
        report.load_s = clock.now() - start_s
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(_measure_lag(report))
            result = await loaded.rollout(task["row"], policy)
            measuring.cancel()
        report.uncopyable = sorted(set(loaded.uncopyable))
    except BaseException as error:
        if being_cancelled():  # user code may raise CancelledError too
            raise
        result = _as_episode_error(error, entry)
    await policy.chat(msgspec.json.encode(report).decode(), agent=REPORT)
    if isinstance(result, EpisodeError):
        raise result
    return result


def _as_episode_error(error: BaseException, entry: str) -> EpisodeError:
    """Return an error of user code as an :class:`~headrace.base.errors.EpisodeError` that contains the line in the
    user's file, which is the part of ``entry`` before its last colon. An error which means that the file cannot be used
    has the reason :data:`UNUSABLE`."""
    error = first_error(error)
    if isinstance(error, EpisodeError):
        return error
    if isinstance(error, HeadraceError):
        return EpisodeError(error.problem, remedy=error.remedy, reason=UNUSABLE)
    return EpisodeError(where(error, entry.rpartition(":")[0]), remedy="")  # the problem names the line


@functools.cache
def _load(kind: str, entry: str, options: str) -> _LoadedEnvironment:
    """Import the user's environment or reward, and return it with the rollout that runs it. The result is cached.
    ``entry`` names the file and the object in it, and ``kind`` says what kind of object it is. ``options`` are the
    options of a bridge, or of an environment of an installed package, as JSON."""
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="environment")
    if kind == "bridge" or kind in ENVIRONMENTS:
        return _LoadedEnvironment(rollout=load_environment(kind, entry, json.loads(options), threads))
    if kind == "reward":
        return _LoadedEnvironment(rollout=_make_reward_rollout(load_reward(entry, threads)))
    uncopyable: list[str] = []
    rollout = load_entry(kind, entry, threads, adapt=lambda target: _add_copy_check(target, uncopyable))
    return _LoadedEnvironment(rollout=rollout, uncopyable=uncopyable)


def _make_reward_rollout(function: RewardFunction) -> Rollout:
    """Return a rollout that tests a reward function: it requests an answer to the row's prompt, and scores the
    answer."""

    async def attempt(row: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Let the scripted policy answer the row's prompt, and return an episode with the reward of the answer. Raises
        :class:`~headrace.base.errors.EpisodeError` if the reward function fails, and
        :class:`~headrace.base.errors.EnvError` if the row lacks a column that the function reads."""
        function.signature.refuse_missing(function.name, row.keys(), by_turn=False)
        prompt = row.get("prompt", "")
        answer = (await policy.chat(prompt or "answer")).message.content
        # a check uses no tokenizer: each byte counts as one token
        ids = (np.frombuffer(answer.encode(), dtype=np.uint8).astype(np.int32),)
        request = ScoreCompletions(call=0, prompt=prompt, completions=(answer,), row=dict(row), completion_ids=ids)
        scores = await function.score(request)
        if scores.failure:
            reason, _, problem = scores.failure.partition(": ")
            raise EpisodeError(problem, remedy="fix the reward", reason=reason)
        return Episode(reward=scores.rewards[0])

    return attempt


def _add_copy_check(target: Any, uncopyable: list[str]) -> Any:
    """Return a subclass of the :class:`Env` class ``target`` that checks its attributes when an object of it is closed:
    descriptions of attributes that cannot be copied are appended to ``uncopyable``. If ``target`` is not an
    :class:`Env` class, it is returned unchanged."""
    if not (isinstance(target, type) and issubclass(target, Env)):
        return target

    class Watched(target):  # type: ignore[misc]
        def close(self) -> Any:
            uncopyable.extend(_find_uncopyable(self))
            return super().close()

    Watched.__name__ = Watched.__qualname__ = target.__name__
    return Watched


def _find_uncopyable(env: Env) -> Iterator[str]:
    """Yield a description of each attribute of the environment that cannot be copied deeply, with the reason."""
    for name, value in vars(env).items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 - objects of the user may raise any error
            yield f"self.{name}, a {type(value).__name__} ({type(error).__name__}: {error})"[:300]


async def _measure_lag(report: TrialReport) -> None:
    """Measure for how long user code blocks the event loop, and store the longest time in ``report.lag_s``. This ends
    only by cancellation. The delay of a thread in the same time is subtracted, because the load of the machine causes
    it and not the user's code."""
    with _LatenessWatch() as watch:
        loop = _Lateness()
        while True:
            await asyncio.sleep(CHECK_S)
            report.lag_s = max(0.0, loop.measure() - watch.lateness.worst_s)


class _Lateness:
    """A measurement of delays. :meth:`measure` should be called every :data:`CHECK_S` seconds; the delay is the
    additional time between two calls."""

    def __init__(self) -> None:
        """Begin without a delay."""
        self._clock = RealClock()
        self._measured_s = self._clock.now()
        """The time of the last call of :meth:`measure`."""
        self.worst_s = 0.0
        """The largest delay so far, in seconds."""

    def measure(self) -> float:
        """Measure the delay since the last call, and return the largest delay so far, in seconds."""
        before_s, self._measured_s = self._measured_s, self._clock.now()
        self.worst_s = max(self.worst_s, self._measured_s - before_s - CHECK_S)
        return self.worst_s


class _LatenessWatch:
    """A thread that measures its own delay within its context. If the thread is late too, the machine is busy."""

    def __init__(self) -> None:
        """Create the thread without starting it."""
        self.lateness = _Lateness()
        """The delays of the thread."""
        self._stopped = threading.Event()
        """Set when the context ends, which stops the thread."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="lateness")

    def __enter__(self) -> Self:
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread, without waiting for its end."""
        self._stopped.set()

    def _run(self) -> None:
        """Measure the delay of the thread every :data:`CHECK_S` seconds until the context ends."""
        while not self._stopped.wait(CHECK_S):
            self.lateness.measure()
