"""What runs in an environment worker while an environment is checked: the user's code, watched from inside.

It is a rollout itself, so that whatever the user's code does is told as in a run; what only this process can see goes
to the check as a question of the agent :data:`~headrace.rollout.environments.scripted.REPORT`.
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

from headrace.base.clock import RealClock
from headrace.base.config.user_code import where
from headrace.base.errors import EpisodeError, HeadraceError
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.rollout.environments.entry import Rollout, load_entry
from headrace.rollout.environments.interface import Env
from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.rollout.environments.scripted import REPORT
from headrace.rollout.scoring.reward import RewardFunction, load_reward
from headrace.wings.bridges import load_bridge

UNUSABLE = "unusable"
"""Reason of an attempt whose file, or what it names there, cannot be used."""
LOOK_S = 0.01
"""How often it is looked whether the loop turns."""


class TrialReport(msgspec.Struct, kw_only=True):
    """What can be seen from inside."""

    load_s: float = 0.0
    """How long the import of the file took; 0 where it was there."""
    lag_s: float = 0.0
    """The longest that code kept the loop from turning."""
    uncopyable: list[str] = []
    """Attributes of the environment that cannot be copied, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    rollout: Rollout
    uncopyable: list[str] = field(default_factory=list)


async def trial(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """One attempt at ``task["row"]`` with what ``task["kind"]``, ``task["entry"]`` and ``task["options"]`` name."""
    clock, report = RealClock(), TrialReport()
    kind, entry = task["kind"], task["entry"]
    began_s = clock.now()
    ended: Episode | EpisodeError
    try:
        loaded = await asyncio.to_thread(_load, kind, entry, json.dumps(task["options"]))
        report.load_s = clock.now() - began_s
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(_look(report))
            ended = await loaded.rollout(task["row"], policy)
            looking.cancel()
        report.uncopyable = sorted(set(loaded.uncopyable))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of user code: its failure is a record
        ended = _told(error, entry)
    await policy.chat(msgspec.json.encode(report).decode(), agent=REPORT)
    if isinstance(ended, EpisodeError):
        raise ended
    return ended


def _told(error: BaseException, entry: str) -> EpisodeError:
    """What went wrong, with the line of the user's file."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EpisodeError):
        return error
    if isinstance(error, HeadraceError):
        return EpisodeError(error.problem, remedy=error.remedy, reason=UNUSABLE)
    try:
        words = where(error, entry.rpartition(":")[0])
    except Exception:  # noqa: BLE001 - the user's ``__str__`` is user code too
        words = f"{type(error).__name__}, which cannot be printed"
    return EpisodeError(words, remedy="mend it")


@functools.cache
def _load(kind: str, entry: str, options: str) -> _Loaded:
    """``options``: of a bridge, as JSON."""
    hands = ThreadPoolExecutor(max_workers=8, thread_name_prefix="environment")
    if kind == "bridge":
        return _Loaded(rollout=load_bridge(entry, json.loads(options), hands))
    if kind == "reward":
        return _Loaded(rollout=_scoring(load_reward(entry, hands)))
    uncopyable: list[str] = []
    rollout = load_entry(kind, entry, hands, adapt=lambda found: _watched(found, uncopyable))
    return _Loaded(rollout=rollout, uncopyable=uncopyable)


def _scoring(function: RewardFunction) -> Rollout:
    """A reward as a rollout: it asks the row's prompt, and scores the answer."""

    async def attempt(row: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
        prompt = row.get("prompt", "")
        said = (await policy.chat(prompt or "answer")).message.content
        # no tokenizer is needed for a check: a byte stands for a token
        ids = (np.frombuffer(said.encode(), dtype=np.uint8).astype(np.int32),)
        request = ScoreCompletions(call=0, prompt=prompt, completions=(said,), row=dict(row), completion_ids=ids)
        scores = await function.score(request)
        if scores.failure:
            reason, _, words = scores.failure.partition(": ")
            raise EpisodeError(words, remedy="mend the reward", reason=reason)
        return Episode(reward=scores.rewards[0])

    return attempt


def _watched(found: Any, uncopyable: list[str]) -> Any:
    """An environment whose objects are looked at before they are closed; anything else as it is."""
    if not (isinstance(found, type) and issubclass(found, Env)):
        return found

    class Watched(found):  # type: ignore[misc]
        def close(self) -> Any:
            uncopyable.extend(_uncopyable(self))
            return super().close()

    Watched.__name__ = Watched.__qualname__ = found.__name__
    return Watched


def _uncopyable(env: Env) -> Iterator[str]:
    for name, value in vars(env).items():
        try:
            copy.deepcopy(value)
        except Exception as error:  # noqa: BLE001 - whatever the user's objects do when they are copied
            yield f"self.{name}, a {type(value).__name__} ({type(error).__name__}: {error})"[:300]


async def _look(report: TrialReport) -> None:
    """Until cancelled: whether this loop turns. How late a thread is at the same time is not the loop's fault."""
    with _LatenessWatch() as watch:
        loop = _Lateness()
        while True:
            await asyncio.sleep(LOOK_S)
            report.lag_s = max(0.0, loop.look() - watch.lateness.worst_s)


class _Lateness:
    """How much later than :data:`LOOK_S` after one look the next one came, at worst."""

    def __init__(self) -> None:
        self._clock = RealClock()
        self._looked_s = self._clock.now()
        self.worst_s = 0.0

    def look(self) -> float:
        """Now; the worst so far."""
        before_s, self._looked_s = self._looked_s, self._clock.now()
        self.worst_s = max(self.worst_s, self._looked_s - before_s - LOOK_S)
        return self.worst_s


class _LatenessWatch:
    """A thread that looks beside the loop: where it is late too, the machine is busy."""

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
        while not self._over.wait(LOOK_S):
            self.lateness.look()
