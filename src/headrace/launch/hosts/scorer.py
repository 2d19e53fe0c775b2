"""The process of a scoring worker. It computes one component of the reward, for example by calling a user's reward
function, for many requests at the same time. Each request has a number, its *call*."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pydantic

from headrace.base.types.messages.controller import CallScores, Scored, Started
from headrace.base.types.messages.scorer import ScoreCompletions, ScoreTogether
from headrace.launch.channel import PartChannel
from headrace.launch.hosts.worker import serve
from headrace.launch.starts import ScorerStart
from headrace.rollout.scoring import AnyReward, RewardConfig, RewardFunction
from headrace.rollout.scoring.base import Grader, TimedGrader

_SECTION: pydantic.TypeAdapter[AnyReward] = pydantic.TypeAdapter(RewardConfig)
"""The adapter that validates the settings of the component."""
START_S = 30.0
"""Seconds that the worker's threads may take to start."""
MAX_THREADS = 16
"""The largest number of concurrent calls of a sync function. Several calls run at the same time because some of them
wait. The number is small because all computing calls share one interpreter lock."""


def run_scorer(start: ScorerStart, channel: PartChannel) -> None:
    """Load the reward component that ``start`` describes, report over ``channel`` that the worker is ready, and score
    requests until the order to shut down. This is the main function of a scoring worker's process."""
    asyncio.run(_serve(start, channel))


def _start_threads(num: int) -> ThreadPoolExecutor:
    """Return a pool of ``num`` threads, all of which are running. They are started before any reward is called, because
    a reward that starts as many processes as the system allows would prevent the start of further threads."""
    threads = ThreadPoolExecutor(max_workers=num, thread_name_prefix="reward")
    barrier = threading.Barrier(num, timeout=START_S)  # if one cannot be started, the others stop waiting
    for future in [threads.submit(barrier.wait) for _ in range(num)]:
        future.result()
    return threads


async def _serve(start: ScorerStart, channel: PartChannel) -> None:
    """Load the reward, raise an error if the data lacks a column that it reads, and score the requests that arrive. At
    most ``concurrency`` of the component's requests are scored at a time."""
    section: AnyReward = _SECTION.validate_python(start.reward)
    threads = _start_threads(min(section.concurrency, MAX_THREADS))
    gate = asyncio.Semaphore(section.concurrency)
    reward = section.grader(threads)
    if isinstance(reward, RewardFunction) and start.columns is not None:
        reward.signature.refuse_missing(reward.name, start.columns, by_turn=section.by_turn)

    async def score(order: ScoreCompletions | ScoreTogether) -> None:
        """Score the completions of one order and send the result. This waits until fewer than ``concurrency`` other
        orders are being scored. When the reward is first called, a report is sent that the call has begun."""
        async with gate:
            scored = await _score(reward, order, lambda: channel.send(Started(call=order.call)))
        channel.send(scored)

    def handle(order: ScoreCompletions | ScoreTogether, calls: asyncio.TaskGroup) -> None:
        """Start a task that executes ``order``."""
        calls.create_task(score(order))

    await serve(channel, handle, facts={"by_group": int(reward.by_group), "wants": " ".join(sorted(reward.wants))})


async def _score(reward: Grader, order: ScoreCompletions | ScoreTogether, on_start: Callable[[], None]) -> Scored:
    """Return the answer to ``order``, for which the grader ``reward`` is called once, or once for each completion.
    ``on_start`` is called when the first call begins."""
    if isinstance(order, ScoreCompletions):
        scores = [await reward.score(order, on_start)]
    else:
        assert isinstance(reward, TimedGrader), "only graders that measure their calls are ordered several at once"
        singles = [
            request.make_single_order(index) for request in order.requests for index in range(len(request.completions))
        ]
        scores = await reward.score_each(singles, on_start)
    calls = tuple(
        CallScores(rewards=each.rewards, error=each.failure, metrics=each.metrics, extra=each.extra) for each in scores
    )
    return Scored(call=order.call, calls=calls, mean_s=_get_mean_s(reward))


def _get_mean_s(reward: Grader) -> float:
    """Return the mean duration of a call of the reward in seconds; infinite if it is not measured."""
    return reward.times.mean_s if isinstance(reward, TimedGrader) else math.inf
