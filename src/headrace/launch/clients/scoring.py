"""The scoring stage of a run: a pool of workers for each component of the reward, and what adds them up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from headrace.base.clock import RealClock
from headrace.base.types.trace import Span
from headrace.launch.clients.scorer import ScorerPool, ScorerPoolConfig, ScoringProcess
from headrace.rollout.scoring import AnyReward
from headrace.rollout.scoring.rubric import Rubric, RubricPart


class ScoringStage:
    """Components side by side, each with its own queue, workers and deadline: none waits for another."""

    def __init__(
        self,
        rewards: Sequence[AnyReward],
        start_worker: Callable[[AnyReward], Awaitable[ScoringProcess]],
        *,
        start_timeout_s: float,
        warn: Callable[[str], None],
        on_span: Callable[[Span], None],
    ) -> None:
        self._pools: list[ScorerPool] = []
        for reward in rewards:
            terms = ScorerPoolConfig(
                num_workers=reward.workers,
                concurrency=reward.concurrency,
                timeout_s=reward.timeout_s,
                start_timeout_s=start_timeout_s,
            )
            self._pools.append(ScorerPool(partial(start_worker, reward), terms, warn=warn))
        components = [
            RubricPart(section=reward, graders=pool) for reward, pool in zip(rewards, self._pools, strict=True)
        ]
        self.rubric = Rubric(components, clock=RealClock(), on_span=on_span)

    def send_warnings_to(self, warn: Callable[[str], None]) -> None:
        """From now on, tell ``warn`` what people should know."""
        for pool in self._pools:
            pool.send_warnings_to(warn)

    async def run(self) -> None:
        """Keep every pool filled; ends only by cancellation, or as :meth:`ScorerPool.run` does."""
        async with asyncio.TaskGroup() as group:
            for pool in self._pools:
                group.create_task(pool.run())

    async def started(self) -> None:
        """Until every worker is there."""
        for pool in self._pools:
            await pool.started()
