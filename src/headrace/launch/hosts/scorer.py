"""The process of a scoring worker, which calls one component of the reward (a user's reward function, for example) for
many requests at the same time. Each request has a number, its *call*."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pydantic

from headrace.base.types.messages.controller import Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.worker import serve
from headrace.launch.starts import ScorerStart
from headrace.rollout.scoring import AnyReward, RewardConfig, RewardFunction
from headrace.rollout.scoring.base import Grader, TimedGrader

_SECTION: pydantic.TypeAdapter[AnyReward] = pydantic.TypeAdapter(RewardConfig)
"""The reader of the component's settings."""
START_S = 30.0
"""Seconds that the worker's threads may take to start."""
MAX_THREADS = 16
"""Number of calls of a sync function at the same time. Several, since some calls wait for others; few, since all that
compute share one lock."""


def run_scorer(start: ScorerStart, channel: PartChannel) -> None:
    """Load the reward component that ``start`` describes, report over ``channel`` that the worker is ready, and score
    requests until it is ordered to shut down. This is the whole work of a scoring worker's process."""
    asyncio.run(_serve(start, channel))


def _started_threads(num: int) -> ThreadPoolExecutor:
    """Return a pool of ``num`` threads that have all started. They are started before any reward is called, since a
    reward that starts as many processes as the system allows would leave no room for further threads."""
    threads = ThreadPoolExecutor(max_workers=num, thread_name_prefix="reward")
    together = threading.Barrier(num, timeout=START_S)  # if one cannot be started, the others stop waiting
    for started in [threads.submit(together.wait) for _ in range(num)]:
        started.result()
    return threads


async def _serve(start: ScorerStart, channel: PartChannel) -> None:
    """Load the reward, refuse it if the data lacks a column that it reads, and score the requests that arrive, at most
    as many at a time as the component's ``concurrency``."""
    section: AnyReward = _SECTION.validate_python(start.reward)
    threads = _started_threads(min(section.concurrency, MAX_THREADS))
    at_once = asyncio.Semaphore(section.concurrency)
    reward = section.grader(threads)
    if isinstance(reward, RewardFunction) and start.columns is not None:
        reward.signature.refuse_missing(reward.name, start.columns, by_turn=section.by_turn)

    async def score(request: ScoreCompletions) -> None:
        """Score the completions of one request, as soon as fewer than ``concurrency`` others are being scored, and send
        the result. A report that the call has begun is sent when the reward is first called."""
        async with at_once:
            scored = await _scored(reward, request, lambda: channel.send(Started(call=request.call)))
        channel.send(scored)

    def handle(request: ScoreCompletions, calls: asyncio.TaskGroup) -> None:
        """Start a task that scores ``request``."""
        calls.create_task(score(request))

    await serve(channel, handle, facts={"by_group": int(reward.by_group), "wants": " ".join(sorted(reward.wants))})


async def _scored(reward: Grader, request: ScoreCompletions, on_start: Callable[[], None]) -> Scored:
    """Return the answer to a request: of one call of the reward if it takes all completions at once or there is only
    one, else of one call after the other. ``on_start`` is called when the first of them begins."""
    if reward.by_group or len(request.completions) == 1:
        scores = await reward.score(request, on_start)
        return Scored(
            call=request.call,
            rewards=scores.rewards,
            error=scores.failure,
            metrics=scores.metrics,
            extra=scores.extra,
            mean_s=_mean_s(reward),
        )
    assert isinstance(reward, TimedGrader), "only graders that measure their calls are ordered several at once"
    singles = [request.single(index) for index in range(len(request.completions))]
    found = [scores.of(0) for scores in await reward.score_each(singles, on_start)]
    metrics: dict[str, tuple[float, ...]] = {}
    for each in found:
        metrics |= {name: (*metrics.get(name, ()), *values) for name, values in each.metrics.items()}
    return Scored(
        call=request.call,
        rewards=tuple(each.reward for each in found),
        metrics=metrics,
        extra=tuple(each.extra for each in found) if any(each.extra for each in found) else (),
        errors=tuple(each.failure for each in found) if any(each.failure for each in found) else (),
        mean_s=_mean_s(reward),
    )


def _mean_s(reward: Grader) -> float:
    """Return the mean seconds of a call of the reward; infinite if they are not measured."""
    return reward.times.mean_s if isinstance(reward, TimedGrader) else math.inf
