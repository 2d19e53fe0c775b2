"""The rollout that runs in an environment worker while an environment is checked: the user's code, observed from
inside.

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
from headrace.rollout.environments.bridges import load_bridge
from headrace.rollout.environments.entry import Rollout, load_entry
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.scripted import REPORT
from headrace.rollout.scoring.reward import RewardFunction, load_reward

UNUSABLE = "unusable"
"""The reason of an attempt whose file, or the object that it names, cannot be used."""
CHECK_S = 0.01
"""Seconds between two measurements of the event loop's delay."""


class TrialReport(msgspec.Struct, kw_only=True):
    """The observations that only the worker process can make."""

    load_s: float = 0.0
    """Seconds that the import of the file took; 0 if it was imported already."""
    lag_s: float = 0.0
    """Longest time, in seconds, for which user code blocked the event loop."""
    uncopyable: list[str] = []
    """The attributes of the environment that cannot be copied, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    rollout: Rollout
    uncopyable: list[str] = field(default_factory=list)


async def trial(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """Make one attempt at ``task["row"]`` with the environment that ``task["kind"]``, ``task["entry"]`` and
    ``task["options"]`` name."""
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
    """Return an error of user code as an :class:`~headrace.base.errors.EpisodeError`, with the line of the user's
    file."""
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
    return EpisodeError(words, remedy="fix it")


@functools.cache
def _load(kind: str, entry: str, options: str) -> _Loaded:
    """Load the environment once; ``options`` are those of a bridge, as JSON."""
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="environment")
    if kind == "bridge":
        return _Loaded(rollout=load_bridge(entry, json.loads(options), threads))
    if kind == "reward":
        return _Loaded(rollout=_scoring(load_reward(entry, threads)))
    uncopyable: list[str] = []
    rollout = load_entry(kind, entry, threads, adapt=lambda found: _watched(found, uncopyable))
    return _Loaded(rollout=rollout, uncopyable=uncopyable)


def _scoring(function: RewardFunction) -> Rollout:
    """Return a rollout that tests a reward function: it sends the row's prompt to the model, and scores the answer."""

    async def attempt(row: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        """Let the scripted policy answer the row's prompt, and return the reward of the answer. Raises
        :class:`~headrace.base.errors.EpisodeError` if the reward function fails."""
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
    """Return a subclass of an :class:`Env` that examines each object before it is closed; return anything else
    unchanged."""
    if not (isinstance(found, type) and issubclass(found, Env)):
        return found

    class Watched(found):  # type: ignore[misc]
        def close(self) -> Any:
            uncopyable.extend(_uncopyable(self))
            return super().close()

    Watched.__name__ = Watched.__qualname__ = found.__name__
    return Watched


def _uncopyable(env: Env) -> Iterator[str]:
    """Yield a description of each attribute of the environment that cannot be copied."""
    for name, value in vars(env).items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 - whatever the user's objects do when they are copied
            yield f"self.{name}, a {type(value).__name__} ({type(error).__name__}: {error})"[:300]


async def _measure_lag(report: TrialReport) -> None:
    """Measure until cancelled how long the event loop is blocked. The delay of a thread in the same time is subtracted,
    since it is not the loop's fault."""
    with _LatenessWatch() as watch:
        loop = _Lateness()
        while True:
            await asyncio.sleep(CHECK_S)
            report.lag_s = max(0.0, loop.measure() - watch.lateness.worst_s)


class _Lateness:
    """The largest delay beyond :data:`CHECK_S` between two measurements."""

    def __init__(self) -> None:
        self._clock = RealClock()
        self._measured_s = self._clock.now()
        self.worst_s = 0.0

    def measure(self) -> float:
        """Measure now, and return the largest delay so far."""
        before_s, self._measured_s = self._measured_s, self._clock.now()
        self.worst_s = max(self.worst_s, self._measured_s - before_s - CHECK_S)
        return self.worst_s


class _LatenessWatch:
    """A thread that measures beside the event loop. If the thread is late too, the machine is busy."""

    def __init__(self) -> None:
        self.lateness = _Lateness()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lateness")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(CHECK_S):
            self.lateness.measure()
