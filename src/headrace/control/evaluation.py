"""Evaluation: the held-out tasks, attempted and scored like any others, outside the ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from headrace.control.parts import Serving
from headrace.errors import EnvError
from headrace.rollout import EpisodeRunner
from headrace.types.episode import Episode, EpisodeKey, EpisodeStatus

MAX_AT_ONCE = 512
"""Attempts in flight: enough to keep any one engine full."""


class Evaluator:
    """Measures the mean reward on the held-out tasks."""

    def __init__(self, parts: Serving, *, samples: int, temperature: float | None, run_seed: int) -> None:
        sampling = msgspec.structs.replace(parts.sampling, record_kept=False, record_routing=False)
        if temperature is not None:
            sampling = msgspec.structs.replace(sampling, temperature=temperature)
        self._parts = parts
        self._samples = samples
        self._sampling = sampling
        self._run_seed = run_seed

    async def mean_reward(self, on_tokens: Callable[[int], None], warn: Callable[[str], None]) -> float | None:
        """The mean reward over all attempts; ``None`` where there are no held-out tasks.

        An attempt that fails counts as 0, and ``warn`` hears of it; :class:`EnvError` if all of them do.
        """
        parts = self._parts
        if not parts.eval_tasks:
            return None
        runner = EpisodeRunner(
            engine=parts.engine,
            env=parts.env,
            sampling=self._sampling,
            run_seed=self._run_seed + 1,  # other draws than training's
            on_tokens=on_tokens,
            chat=parts.chat,
            limits=parts.limits,
            timeout_s=parts.episode_timeout_s,
            retries=parts.episode_retries,
        )
        gate = asyncio.Semaphore(MAX_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            attempts = [
                group.create_task(self._attempt(runner, row, sample, gate))
                for row in range(len(parts.eval_tasks))
                for sample in range(self._samples)
            ]
        outcomes = [attempt.result() for attempt in attempts]
        rewards = [outcome for outcome in outcomes if isinstance(outcome, float)]
        if not rewards:
            raise EnvError(
                f"no held-out task could be scored; the first failed with {outcomes[0]}", remedy="mend the reward"
            )
        failures = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
        if failures:
            cause, times = failures.most_common(1)[0]
            failed = failures.total()
            warn(f"{failed} of {len(outcomes)} held-out attempts failed and count as 0; {times} of them: {cause}")
        return sum(rewards) / len(outcomes)

    async def _attempt(self, runner: EpisodeRunner, row: int, sample: int, gate: asyncio.Semaphore) -> float | str:
        parts = self._parts
        task = parts.eval_tasks[row]
        async with gate:
            episode = await runner.run(EpisodeKey(row, sample), task)
            if episode.status is EpisodeStatus.FAILED:
                return episode.cause
            if episode.reward is not None:
                return episode.reward
            scores = await parts.scorer.score(task, (completion_text(parts, episode),))
            runner.on_tokens(0)  # a reward is progress too
        graded = scores.of(0)
        return graded.failure or (graded.reward if graded.reward is not None else "reward_none")


def completion_text(parts: Serving, episode: Episode) -> str:
    """What the policy wrote in the last of its turns, as text; the stop token is not part of it."""
    sampled = [turn.tokens.ids_T.tolist() for turn in episode.turns if turn.stop_reason is not None]
    ids = sampled[-1] if sampled else []
    if ids and ids[-1] in parts.sampling.stop_ids:
        ids = ids[:-1]
    return parts.decode(ids)
