"""The rollout that runs in an environment worker while an environment is checked before a run (a *trial*): the user's
code, observed from inside, with a scripted agent in place of a model.

It is a rollout itself, so that problems of the user's code are reported as in a run. Observations that only this
process can make go to the check as a message to the agent :data:`~headrace.rollout.environments.scripted.REPORT`.
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
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.environments.bridges import load_environment
from headrace.rollout.environments.entry import Rollout, load_entry
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.registry import ENVIRONMENTS
from headrace.rollout.environments.scripted import REPORT
from headrace.rollout.scoring.reward import RewardFunction, load_reward

UNUSABLE = "unusable"
"""The reason of an attempt whose file, or the object that it names, cannot be used."""
CHECK_S = 0.01
"""Seconds between two measurements of the event loop's delay."""


class TrialReport(msgspec.Struct, kw_only=True):
    """The observations of one attempt that only the worker process can make; they go to the check as JSON."""

    load_s: float = 0.0
    """Seconds that the import of the file took; 0 if it was imported already."""
    lag_s: float = 0.0
    """Longest time, in seconds, for which user code blocked the event loop."""
    uncopyable: list[str] = []
    """The attributes of the environment that cannot be copied, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """The user's environment after its file was imported."""

    rollout: Rollout
    """The function that runs one episode of it."""
    uncopyable: list[str] = field(default_factory=list)
    """Descriptions of attributes that could not be copied; episodes add to it when they end."""


async def trial(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """Make one attempt at ``task["row"]`` with the environment that ``task["kind"]``, ``task["entry"]`` and
    ``task["options"]`` name, send a :class:`TrialReport` to the check, and return the ended episode. Raises
    :class:`~headrace.base.errors.EpisodeError` if the attempt failed or the environment cannot be used."""
    clock, report = RealClock(), TrialReport()
    kind, entry = task["kind"], task["entry"]
    began_s = clock.now()
    ended: Episode | EpisodeError
    try:
        loaded = await asyncio.to_thread(_load, kind, entry, json.dumps(task["options"]))
        report.load_s = clock.now() - began_s
        async with asyncio.TaskGroup() as group:
            measuring = group.create_task(_measure_lag(report))
            ended = await loaded.rollout(task["row"], policy)
            measuring.cancel()
        report.uncopyable = sorted(set(loaded.uncopyable))
    except BaseException as error:
        if being_cancelled():  # user code may raise CancelledError too
            raise
        ended = _as_episode_error(error, entry)
    await policy.chat(msgspec.json.encode(report).decode(), agent=REPORT)
    if isinstance(ended, EpisodeError):
        raise ended
    return ended


def _as_episode_error(error: BaseException, entry: str) -> EpisodeError:
    """Return an error of user code as an :class:`~headrace.base.errors.EpisodeError` that names the line of the user's
    file, which is the part of ``entry`` before its last colon. An error that says that the file cannot be used gets the
    reason :data:`UNUSABLE`."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EpisodeError):
        return error
    if isinstance(error, HeadraceError):
        return EpisodeError(error.problem, remedy=error.remedy, reason=UNUSABLE)
    try:
        words = where(error, entry.rpartition(":")[0])
    except BaseException:  # noqa: BLE001 - the user's ``__str__`` is user code too
        words = f"{type(error).__name__}, which cannot be printed"
    return EpisodeError(words, remedy="")  # the words name the line


@functools.cache
def _load(kind: str, entry: str, options: str) -> _Loaded:
    """Import the user's environment or reward, and return the rollout over it; a second call with the same arguments
    returns the same. ``entry`` names the file and the object in it, ``kind`` says what that is, and ``options`` are the
    options of a bridge to another library's environments, or of an installed package's environment, as JSON."""
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="environment")
    if kind == "bridge" or kind in ENVIRONMENTS:
        return _Loaded(rollout=load_environment(kind, entry, json.loads(options), threads))
    if kind == "reward":
        return _Loaded(rollout=_scoring(load_reward(entry, threads)))
    uncopyable: list[str] = []
    rollout = load_entry(kind, entry, threads, adapt=lambda found: _watched(found, uncopyable))
    return _Loaded(rollout=rollout, uncopyable=uncopyable)


def _scoring(function: RewardFunction) -> Rollout:
    """Return a rollout that tests a reward function: it sends the row's prompt to the model, and scores the answer."""

    async def attempt(row: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Let the scripted policy answer the row's prompt, and return the reward of the answer. Raises
        :class:`~headrace.base.errors.EpisodeError` if the reward function fails, and
        :class:`~headrace.base.errors.EnvError` if the row lacks a column that it reads."""
        function.signature.refuse_missing(function.name, row.keys(), by_turn=False)
        prompt = row.get("prompt", "")
        answer = (await policy.chat(prompt or "answer")).message.content
        # no tokenizer is needed for a check: a byte stands for a token
        ids = (np.frombuffer(answer.encode(), dtype=np.uint8).astype(np.int32),)
        request = ScoreCompletions(call=0, prompt=prompt, completions=(answer,), row=dict(row), completion_ids=ids)
        scores = await function.score(request)
        if scores.failure:
            reason, _, words = scores.failure.partition(": ")
            raise EpisodeError(words, remedy="fix the reward", reason=reason)
        return Episode(reward=scores.rewards[0])

    return attempt


def _watched(found: Any, uncopyable: list[str]) -> Any:
    """Return a subclass of the :class:`Env` class ``found`` that, when an object of it is closed, adds descriptions of
    its attributes that cannot be copied to ``uncopyable``. Anything else is returned unchanged."""
    if not (isinstance(found, type) and issubclass(found, Env)):
        return found

    class Watched(found):  # type: ignore[misc]
        def close(self) -> Any:
            uncopyable.extend(_uncopyable(self))
            return super().close()

    Watched.__name__ = Watched.__qualname__ = found.__name__
    return Watched


def _uncopyable(env: Env) -> Iterator[str]:
    """Yield a description of each attribute of the environment that cannot be copied deeply, with the reason."""
    for name, value in vars(env).items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 - whatever the user's objects do when they are copied
            yield f"self.{name}, a {type(value).__name__} ({type(error).__name__}: {error})"[:300]


async def _measure_lag(report: TrialReport) -> None:
    """Measure until cancelled for how long user code blocks the event loop, and store the longest time in
    ``report.lag_s``. The delay of a thread in the same time is subtracted: the machine caused it, and not the user's
    code."""
    with _LatenessWatch() as watch:
        loop = _Lateness()
        while True:
            await asyncio.sleep(CHECK_S)
            report.lag_s = max(0.0, loop.measure() - watch.lateness.worst_s)


class _Lateness:
    """A measurement of lateness: the largest time between two calls of :meth:`measure`, beyond :data:`CHECK_S` seconds,
    at which it should be called."""

    def __init__(self) -> None:
        self._clock = RealClock()
        self._measured_s = self._clock.now()
        self.worst_s = 0.0

    def measure(self) -> float:
        """Measure the delay since the last call, and return the largest delay so far, in seconds."""
        before_s, self._measured_s = self._measured_s, self._clock.now()
        self.worst_s = max(self.worst_s, self._measured_s - before_s - CHECK_S)
        return self.worst_s


class _LatenessWatch:
    """A thread that measures its own lateness beside the event loop, within its context. If the thread is late too, the
    machine is busy."""

    def __init__(self) -> None:
        self.lateness = _Lateness()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lateness")

    def __enter__(self) -> Self:
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let the thread end; it is not waited for."""
        self._over.set()

    def _run(self) -> None:
        """Measure the thread's lateness every :data:`CHECK_S` seconds until the context ends."""
        while not self._over.wait(CHECK_S):
            self.lateness.measure()
