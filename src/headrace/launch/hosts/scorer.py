"""A scoring worker's process: many calls of one component of the reward at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pydantic

from headrace.base.environ import forget_token, run_token
from headrace.base.types.messages.codec import Shutdown
from headrace.base.types.messages.controller import Ready, Scored, Started
from headrace.base.types.messages.scorer import Message, ScoreCompletions
from headrace.launch.channel import PartChannel
from headrace.launch.starts import ScorerStart
from headrace.rollout.scoring import AnyReward, RewardConfig, RewardFunction

_SECTION: pydantic.TypeAdapter[AnyReward] = pydantic.TypeAdapter(RewardConfig)
WAIT_S = 60.0
"""How long to wait for orders at a time."""
START_S = 30.0
"""How long its threads may take to come."""
MAX_THREADS = 16
"""Calls of a sync function at once: some wait for others, so several; all that compute share one lock, so few."""


def run_scorer(start: ScorerStart, channel: PartChannel) -> None:
    """Make the grader, report, serve until told to shut down."""
    asyncio.run(_serve(start, channel))


def _hands(num: int) -> ThreadPoolExecutor:
    """Threads that are all there: where one reward has started as many processes as it may, the others could start
    none."""
    hands = ThreadPoolExecutor(max_workers=num, thread_name_prefix="reward")
    together = threading.Barrier(num, timeout=START_S)  # where one cannot be started, the others do not wait for ever
    for here in [hands.submit(together.wait) for _ in range(num)]:
        here.result()
    return hands


async def _serve(start: ScorerStart, channel: PartChannel) -> None:
    loop = asyncio.get_running_loop()
    ears = ThreadPoolExecutor(max_workers=1, thread_name_prefix="orders")
    section: AnyReward = _SECTION.validate_python(start.reward)
    hands = _hands(min(section.concurrency, MAX_THREADS))
    room = asyncio.Semaphore(section.concurrency)
    reward = section.grader(hands)
    if isinstance(reward, RewardFunction) and start.columns is not None:
        reward.signature.refuse_missing(reward.name, start.columns, by_turn=section.by_turn)
    facts: dict[str, str | int | float] = {"by_group": int(reward.by_group), "wants": " ".join(sorted(reward.wants))}
    channel.send(Ready(token=run_token(), pid=os.getpid(), facts=facts))
    forget_token()

    async def score(request: ScoreCompletions) -> None:
        async with room:
            scores = await reward.score(request, lambda: channel.send(Started(call=request.call)))
        channel.send(
            Scored(
                call=request.call,
                rewards=scores.rewards,
                error=scores.failure,
                metrics=scores.metrics,
                extra=scores.extra,
            )
        )

    def obey(message: Message, calls: asyncio.TaskGroup) -> None:
        if isinstance(message, Shutdown):
            os.killpg(0, signal.SIGKILL)  # a reward that never returns must not keep it alive, nor what it started
        else:
            calls.create_task(score(message))

    async with asyncio.TaskGroup() as calls:
        while True:
            for message in await loop.run_in_executor(ears, channel.receive, WAIT_S):
                obey(message, calls)
