"""Evaluation on held-out tasks. They are attempted and scored like training tasks, including process rewards, but the
attempts are not recorded in the ledger.

tasks × samples ──▶ EpisodeRunner ──▶ scorer, and for each turn the turn scorer ──▶ rewards by task ──▶ estimates

A *sample* is one attempt at a task. An estimate is the mean over tasks of one number for each task, which is computed
from all attempts at this task. Its error is computed over tasks, because attempts at the same task are not independent
(Miller 2024, arXiv 2411.00640, "clustered" errors).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, variance

import msgspec
import numpy as np

from headrace.base.errors import EnvError
from headrace.base.types.episode import EpisodeGraph, EpisodeKey, EpisodeStatus
from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.tokens import IntColumn
from headrace.control.metrics.rewards import RewardCounts
from headrace.control.parts import Serving
from headrace.control.turns import ProcessRewards, assign_reward
from headrace.rollout import EpisodeRunner
from headrace.rollout.agents import FROZEN_AGENT
from headrace.rollout.runner import find_remedy
from headrace.rollout.scoring import Graded, ScoringContext

MAX_AT_ONCE = 512
"""Maximum number of attempts that run at the same time, enough to use a single engine fully."""
CERTAINTY = 0.95
"""The confidence level of intervals."""
_Z = NormalDist().inv_cdf((1 + CERTAINTY) / 2)
"""The quantile of the standard normal distribution for this confidence level."""

OnAttempt = Callable[[EpisodeGraph], Awaitable[None]]
"""A function that is called with each attempt after it was scored or has failed. The key of the attempt contains the
index of the task and the index of the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationListener:
    """The callbacks with which an evaluation reports to its caller."""

    on_tokens: Callable[[int], None]
    """Called with the number of tokens that have arrived; 0 for progress of another kind."""
    warn: Callable[[str], None]
    """Called with warnings for users."""
    on_attempt: OnAttempt | None = None
    """Called with each attempt; ``None``: the caller does not need single attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EvaluationRun:
    """The objects that all attempts of one evaluation share."""

    listener: EvaluationListener
    """The callbacks to which the evaluation reports."""
    runner: EpisodeRunner
    """The runner of its episodes."""
    turns: ProcessRewards | None
    """The process rewards of its episodes; ``None``: there are none."""
    gate: asyncio.Semaphore
    """A semaphore that limits the number of attempts at the same time."""
    reward_counts: RewardCounts = field(default_factory=RewardCounts)
    """The counts of failures of each component of the reward."""


class Evaluator:
    """The component that runs attempts at the held-out tasks, scores them and returns their rewards. The controller and
    the command that evaluates a model each create one."""

    def __init__(
        self,
        parts: Serving,
        *,
        samples: int,
        temperature: float | None,
        run_seed: int,
        trainer: Callable[[int], TrainerState] = lambda version: TrainerState(global_step=version),
    ) -> None:
        """Create an evaluator. ``parts`` contains the engine, environment and scorers, and ``samples`` is the number of
        attempts at each task. ``temperature`` is the sampling temperature; ``None``: the temperature of training.
        ``run_seed`` is the seed of the run; evaluations draw other random numbers from it than training. ``trainer``
        returns the trainer state at a version of the weights, for reward functions that request it."""
        sampling = msgspec.structs.replace(
            parts.sampling, record_kept=False, record_routing=False, record_entropy=False
        )  # fmt: skip
        if temperature is not None:
            sampling = msgspec.structs.replace(sampling, temperature=temperature)
        self._parts = parts
        self._num_samples = samples
        """The number of attempts at each task."""
        self._sampling = sampling
        """The sampling parameters of the attempts."""
        self._run_seed = run_seed
        self._trainer = trainer
        """The function that returns the trainer state at a version of the weights."""

    async def mean_reward(self, on_tokens: Callable[[int], None], warn: Callable[[str], None]) -> float | None:
        """Attempt all held-out tasks and return the mean reward; ``None`` if there are no held-out tasks. ``on_tokens``
        is called with the number of tokens that have arrived, ``warn`` with warnings for users. See :meth:`rewards`."""
        if not self._parts.eval_tasks:
            return None
        rewards = await self.rewards(EvaluationListener(on_tokens=on_tokens, warn=warn))
        return estimate_mean([sum(task) / len(task) for task in rewards]).value

    async def rewards(self, listener: EvaluationListener) -> list[list[float]]:
        """Attempt all held-out tasks and return the reward of every attempt, one list for each task. The reward of a
        failed attempt is 0, and ``listener.warn`` is called. Raises :class:`~headrace.base.errors.EnvError` if all
        attempts fail."""
        parts = self._parts
        async with asyncio.TaskGroup() as group:
            turns = None
            if parts.turn_scorer is not None:
                turn_parts = parts if parts.segments is None else replace(parts, segments=lambda _: ())
                # evaluation records no entropies, which the cut into segments needs
                turns = ProcessRewards(
                    turn_parts, parts.turn_scorer, group, nullcontext, trainer=lambda _: self._current_trainer_state()
                )
            gate = asyncio.Semaphore(MAX_AT_ONCE)
            run = _EvaluationRun(listener=listener, runner=self._make_runner(listener, turns), turns=turns, gate=gate)
            rows = [group.create_task(self._run_task(run, row)) for row in range(len(parts.eval_tasks))]
        episodes = [row.result() for row in rows]
        failures = Counter(e.cause for row in episodes for e in row if e.status is not EpisodeStatus.SCORED)
        self._warn_of_failures(failures, len(rows) * self._num_samples, listener.warn)
        for label, counts in run.reward_counts.get_failing().items():
            listener.warn(f"held-out attempts: the reward {label!r}, which counts as its default then, {counts}")
        return [[episode.reward or 0.0 for episode in row] for row in episodes]

    def _warn_of_failures(self, failures: Counter[str], num_attempts: int, warn: Callable[[str], None]) -> None:
        """Call ``warn`` if attempts have failed, with the most frequent cause. ``failures`` is the number of failed
        attempts by cause, among ``num_attempts`` attempts. Raises :class:`~headrace.base.errors.EnvError` if all
        attempts failed."""
        if not failures:
            return
        cause, times = failures.most_common(1)[0]
        if failures.total() == num_attempts:
            raise EnvError(f"no held-out task could be scored; most failed with {cause}", remedy=find_remedy(cause))
        failed = failures.total()
        warn(f"{failed} of {num_attempts} held-out attempts failed and count as 0; {times} of them: {cause}")

    def _make_runner(self, listener: EvaluationListener, turns: ProcessRewards | None) -> EpisodeRunner:
        """Return the runner of evaluation episodes, which reports arrived tokens to ``listener``. ``turns``, if not
        ``None``, computes the process reward of each turn when the turn ends."""
        parts = self._parts
        seed = self._run_seed + 1  # other random numbers than training
        runner = replace(parts.make_runner(seed, listener.on_tokens), sampling=self._sampling)
        if turns is None:
            return runner
        return replace(
            runner,
            on_turn=lambda key, prompt_ids_T, turn: turns.turn_ended(
                key, parts.eval_tasks[key.group], prompt_ids_T, turn
            ),
        )

    async def _run_task(self, run: _EvaluationRun, row: int) -> list[EpisodeGraph]:
        """Run and score all attempts at the held-out task with the index ``row``, and return their episodes."""
        async with asyncio.TaskGroup() as group:
            attempts = [group.create_task(self._run_attempt(run, row, sample)) for sample in range(self._num_samples)]
        episodes = [attempt.result() for attempt in attempts]
        unscored = [episode for episode in episodes if episode.status is EpisodeStatus.FINISHED]
        if unscored:  # a scorer of whole groups scores all attempts at a task together
            await self._score(run, unscored)
        return episodes

    async def _run_attempt(self, run: _EvaluationRun, row: int, sample: int) -> EpisodeGraph:
        """Run the attempt number ``sample`` at the task with the index ``row``, and score it unless the scorer needs
        all attempts at the task. Return its episode."""
        parts = self._parts
        async with run.gate:
            episode = await run.runner.run(EpisodeKey(row, sample), parts.eval_tasks[row])
            if episode.status is not EpisodeStatus.FINISHED:
                if run.turns is not None:
                    run.turns.forget(episode.key)
                await self._report_attempt(run, episode)
            elif episode.reward is not None:  # the environment has returned the reward
                await self._grade(run, episode, Graded(reward=episode.reward))
            elif not parts.scorer.by_group:
                await self._score(run, [episode])
        return episode

    async def _score(self, run: _EvaluationRun, episodes: Sequence[EpisodeGraph]) -> None:
        """Score ``episodes``, attempts at one task, together, and set the reward of each of them."""
        ids = tuple(map(completion_ids, episodes))
        texts = tuple(map(self._parts.decode_answer, ids))
        context = ScoringContext(completion_ids=ids, trainer=self._current_trainer_state())
        scores = await self._parts.scorer.score(self._parts.eval_tasks[episodes[0].key.group], texts, context)
        for index, episode in enumerate(episodes):
            await self._grade(run, episode, scores.get_graded(index))

    def _current_trainer_state(self) -> TrainerState:
        """Return the trainer state at the version that the engine uses now."""
        return self._trainer(max(0, self._parts.engine.stats().version))

    async def _grade(self, run: _EvaluationRun, episode: EpisodeGraph, graded: Graded) -> None:
        """Set the reward of an attempt from ``graded``, combined with the process rewards of its turns if there are
        any, and report the attempt to the listener."""
        if run.turns is not None:
            graded = await run.turns.add(episode, graded)
        if graded.reward is not None:  # otherwise the failure of the attempt is reported instead
            run.reward_counts.add(graded, lambda text, kind: None)  # reported once, at the end of the evaluation
        assign_reward(episode, graded)
        await self._report_attempt(run, episode)

    async def _report_attempt(self, run: _EvaluationRun, episode: EpisodeGraph) -> None:
        """Report an attempt that has its reward, or has failed, to the listener, and then free the memory of its
        turns."""
        run.listener.on_tokens(0)  # a reward is progress without tokens
        if run.listener.on_attempt is not None:
            await run.listener.on_attempt(episode)
        episode.turns.clear()  # so that the memory of thousands of attempts is not needed until the end


def completion_ids(episode: EpisodeGraph) -> IntColumn:
    """Return the token ids of the last turn of ``episode`` that the policy sampled, including the stop token; empty if
    the policy sampled no turn."""
    turns = [turn for turn in episode.turns if turn.untrained != FROZEN_AGENT and turn.stop_reason is not None]
    return turns[-1].tokens.ids_T if turns else np.zeros(0, np.int32)


class IntervalEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of a mean over tasks, with its 95 % confidence interval."""

    value: float
    """The mean over the tasks."""
    low: float | None
    """The lower end of the interval; ``None`` for a single task, from which no interval can be computed."""
    high: float | None
    """The upper end of the interval; ``None`` for a single task."""


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` attempts at a task passes, estimated without bias from
    ``num_attempts`` attempts of which ``num_passed`` passed: 1 − C(n−c, k) / C(n, k) (Chen et al. 2021, arXiv
    2107.03374, equation 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 4, 4)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(num_attempts - num_passed, k) / math.comb(num_attempts, k)


def pass_hat_k(num_attempts: int, num_passed: int, k: int) -> float:
    """Return the probability that all of ``k`` attempts at a task pass, estimated from ``num_attempts`` attempts of
    which ``num_passed`` passed: C(c, k) / C(n, k) (pass^k of Yao et al. 2024, arXiv 2406.12045).

    >>> pass_hat_k(4, 2, 1), pass_hat_k(4, 2, 2), pass_hat_k(4, 1, 2)
    (0.5, 0.16666666666666666, 0.0)
    """
    return math.comb(num_passed, k) / math.comb(num_attempts, k)


def estimate_mean(figures: Sequence[float]) -> IntervalEstimate:
    """Return the mean of ``figures``, one number for each task, with a 95 % interval (normal approximation) from their
    variance; there is no interval for a single task.

    >>> estimate_mean([1.0, 2.0, 3.0])
    IntervalEstimate(value=2.0, low=0.868..., high=3.131...)
    """
    value = fmean(figures)
    if len(figures) == 1:
        return IntervalEstimate(value=value, low=None, high=None)
    half = _Z * math.sqrt(variance(figures) / len(figures))
    return IntervalEstimate(value=value, low=value - half, high=value + half)


def estimate_share(tasks: Sequence[float]) -> IntervalEstimate:
    """Return the mean of ``tasks``, one number between 0 and 1 for each task, with Wilson's 95 % interval (1927), which
    is within these bounds; there is no interval for a single task.

    The interval uses the effective number of tasks, which is computed from their variance (Korn and Graubard 1998). If
    all numbers are equal, or the mean is 0 or 1, it is the number of tasks.

    >>> estimate_share([0.0] * 10)
    IntervalEstimate(value=0.0, low=0.0, high=0.277...)
    """
    value, count = fmean(tasks), float(len(tasks))
    if len(tasks) == 1:
        return IntervalEstimate(value=value, low=None, high=None)
    spread = variance(tasks) / count
    if spread > 0 and 0 < value < 1:
        count = value * (1 - value) / spread
    # centre and half width of Wilson's interval
    middle = (value + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(value * (1 - value) / count + (_Z / (2 * count)) ** 2)
    low = 0.0 if value == 0 else max(0.0, middle - half)  # exactly 0, which rounding could miss
    return IntervalEstimate(value=value, low=low, high=1.0 if value == 1 else min(1.0, middle + half))
