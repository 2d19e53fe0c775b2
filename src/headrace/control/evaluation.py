"""Evaluation: the held-out tasks, attempted and scored like any others, process rewards included, outside the ledger.

tasks × samples ──▶ EpisodeRunner ──▶ scorer, and for each turn the turn scorer ──▶ rewards by task ──▶ estimates
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from headrace.base.errors import EnvError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.tokens import IntColumn
from headrace.control.estimates import mean_of
from headrace.control.parts import Serving
from headrace.control.rewarding import RewardBook
from headrace.control.turns import TurnScores, settle
from headrace.rollout import EpisodeRunner
from headrace.rollout.agents import FROZEN_AGENT
from headrace.rollout.runner import remedy_of
from headrace.rollout.scoring import Graded, ScoringContext

MAX_AT_ONCE = 512
"""Attempts in flight: enough to keep any one engine full."""

Keep = Callable[[EpisodeGraph], Awaitable[None]]
"""Told of an attempt that has been scored, or has failed; its key is the task's place and the attempt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationListener:
    """Who hears of an evaluation while it goes on."""

    on_tokens: Callable[[int], None]
    """How many tokens have arrived; 0 for progress of another kind."""
    warn: Callable[[str], None]
    """What people should know."""
    keep: Keep | None = None
    """``None``: nobody looks at single attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationRun:
    """One evaluation."""

    told: EvaluationListener
    runner: EpisodeRunner
    turns: TurnScores | None
    """Process rewards; ``None`` where there are none."""
    gate: asyncio.Semaphore
    book: RewardBook = field(default_factory=RewardBook)
    """How often each component of the reward failed."""


class Evaluator:
    """Attempts the held-out tasks."""

    def __init__(
        self,
        parts: Serving,
        *,
        samples: int,
        temperature: float | None,
        run_seed: int,
        trainer: Callable[[int], TrainerState] = lambda version: TrainerState(global_step=version),
    ) -> None:
        """``trainer`` says to rewards where the run is, at a version of the weights."""
        sampling = msgspec.structs.replace(
            parts.sampling, record_kept=False, record_routing=False, record_entropy=False
        )  # fmt: skip
        if temperature is not None:
            sampling = msgspec.structs.replace(sampling, temperature=temperature)
        self._parts = parts
        self._samples = samples
        self._sampling = sampling
        self._run_seed = run_seed
        self._trainer = trainer

    async def mean_reward(self, on_tokens: Callable[[int], None], warn: Callable[[str], None]) -> float | None:
        """The mean reward over all attempts; ``None`` where there are no held-out tasks. See :meth:`rewards`."""
        if not self._parts.eval_tasks:
            return None
        rewards = await self.rewards(EvaluationListener(on_tokens=on_tokens, warn=warn))
        return mean_of([sum(task) / len(task) for task in rewards]).value

    async def rewards(self, told: EvaluationListener) -> list[list[float]]:
        """The reward of every attempt, by task. One that fails counts as 0, and is warned of; :class:`EnvError` if all
        of them do."""
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            turns = None
            if parts.turn_scorer is not None:
                whole = parts if parts.segments is None else replace(parts, segments=lambda _: ())
                turns = TurnScores(
                    whole, parts.turn_scorer, group, nullcontext, trainer=lambda _: self._now()
                )  # no entropies are there to cut by
            gate = asyncio.Semaphore(MAX_AT_ONCE)
            trial = _EvaluationRun(told=told, runner=self._runner(told, turns), turns=turns, gate=gate)
            rows = [group.create_task(self._row(trial, row)) for row in range(len(parts.eval_tasks))]
        episodes = [row.result() for row in rows]
        failures = Counter(e.cause for row in episodes for e in row if e.status is not EpisodeStatus.SCORED)
        self._tell_of(failures, len(rows) * self._samples, told.warn)
        for label, counts in trial.book.failing().items():
            told.warn(f"held-out attempts: the reward {label!r}, which counts as its default then, {counts}")
        return [[episode.reward or 0.0 for episode in row] for row in episodes]

    def _tell_of(self, failures: Counter[str], num_attempts: int, warn: Callable[[str], None]) -> None:
        if not failures:
            return
        cause, times = failures.most_common(1)[0]
        if failures.total() == num_attempts:
            raise EnvError(f"no held-out task could be scored; most failed with {cause}", remedy=remedy_of(cause))
        failed = failures.total()
        warn(f"{failed} of {num_attempts} held-out attempts failed and count as 0; {times} of them: {cause}")

    def _runner(self, told: EvaluationListener, turns: TurnScores | None) -> EpisodeRunner:
        parts = self._parts
        runner = EpisodeRunner(
            engine=parts.engine,
            env=parts.env,
            sampling=self._sampling,
            run_seed=self._run_seed + 1,  # other draws than training's
            on_tokens=told.on_tokens,
            agents=parts.agents,
            chat=parts.chat,
            limits=parts.limits,
            timeout_s=parts.episode_timeout_s,
            retries=parts.episode_retries,
        )
        if turns is None:
            return runner
        return replace(
            runner,
            on_turn=lambda key, prompt_ids_T, turn: turns.turn_ended(
                key, parts.eval_tasks[key.group], prompt_ids_T, turn
            ),
        )

    async def _row(self, trial: _EvaluationRun, row: int) -> list[EpisodeGraph]:
        """All attempts at one task."""
        async with asyncio.TaskGroup() as group:
            attempts = [group.create_task(self._attempt(trial, row, sample)) for sample in range(self._samples)]
        episodes = [attempt.result() for attempt in attempts]
        left = [episode for episode in episodes if episode.status is EpisodeStatus.FINISHED]
        if left:  # they are scored as a group
            await self._score(trial, left)
        return episodes

    async def _attempt(self, trial: _EvaluationRun, row: int, sample: int) -> EpisodeGraph:
        parts = self._parts
        async with trial.gate:
            episode = await trial.runner.run(EpisodeKey(row, sample), parts.eval_tasks[row])
            if episode.status is not EpisodeStatus.FINISHED:
                if trial.turns is not None:
                    trial.turns.forget(episode.key)
                await self._keep(trial, episode)
            elif episode.reward is not None:  # its environment has said how much
                await self._grade(trial, episode, Graded(reward=episode.reward))
            elif not parts.scorer.by_group:
                await self._score(trial, [episode])
        return episode

    async def _score(self, trial: _EvaluationRun, episodes: Sequence[EpisodeGraph]) -> None:
        texts = tuple(completion_text(self._parts, episode) for episode in episodes)
        ids = tuple(completion_ids(episode) for episode in episodes)
        context = ScoringContext(completion_ids=ids, trainer=self._now())
        scores = await self._parts.scorer.score(self._parts.eval_tasks[episodes[0].key.group], texts, context)
        for place, episode in enumerate(episodes):
            await self._grade(trial, episode, scores.of(place))

    def _now(self) -> TrainerState:
        return self._trainer(max(0, self._parts.engine.stats().version))

    async def _grade(self, trial: _EvaluationRun, episode: EpisodeGraph, graded: Graded) -> None:
        if trial.turns is not None:
            graded = await trial.turns.add(episode, graded)
        if graded.reward is not None:  # a failure that costs the attempt is told as such
            trial.book.add(graded, lambda words, kind: None)  # told at the end, once
        settle(episode, graded)
        await self._keep(trial, episode)

    async def _keep(self, trial: _EvaluationRun, episode: EpisodeGraph) -> None:
        trial.told.on_tokens(0)  # a reward is progress too
        if trial.told.keep is not None:
            await trial.told.keep(episode)
        episode.turns.clear()  # thousands of attempts need not be held until the end


def completion_ids(episode: EpisodeGraph) -> IntColumn:
    """The tokens of the last turn that the policy wrote, as they were sampled, a stop token included."""
    turns = [turn for turn in episode.turns if turn.untrained != FROZEN_AGENT and turn.stop_reason is not None]
    return turns[-1].tokens.ids_T if turns else np.zeros(0, np.int32)


def completion_text(parts: Serving, episode: EpisodeGraph) -> str:
    """What the policy wrote in the last of its turns, as text; the stop token is not part of it."""
    ids = completion_ids(episode).tolist()
    if ids and ids[-1] in parts.sampling.stop_ids:
        ids = ids[:-1]
    return parts.decode(ids)
