"""The workload of a simulated run: distributions of the lengths of prompts and answers and of the times of environments
and rewards, and the random draws from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field, PositiveFloat

from headrace.base.config import Section
from headrace.wings.plan.spread import AnySpread, ConstantSpread, Draws, Lognormal, Spread, Uniform

MEAN_DRAWS = 8192
"""Number of random draws from which the mean length of an episode is estimated."""


class Workload(Section):
    """The table ``[workload]`` of a cluster file. A distribution is a number, or a table with its ``kind``."""

    prompt_tokens: AnySpread = ConstantSpread(value=256)
    """Number of tokens of a task's prompt, chat template included."""
    answer_tokens: AnySpread = Lognormal(mean=1024, cv=1.0)
    """Number of tokens of one answer; longer draws are cut to ``engine.max_new_tokens``."""
    turns: AnySpread = ConstantSpread(value=1)
    """Number of answers of an episode."""
    observed_tokens: AnySpread = ConstantSpread(value=0)
    """Number of tokens between two answers, such as tool results or messages of a user."""
    turn_s: AnySpread = ConstantSpread(value=0)
    """Seconds between two answers, spent by tools or the environment."""
    reward_s: AnySpread = ConstantSpread(value=0)
    """Seconds that the reward of an episode takes."""
    reward_slots: int | None = Field(default=None, ge=1)
    """Number of rewards computed at once; unset: no limit."""
    solved: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    """Parameters (a, b) of the Beta distribution of the tasks' probabilities of being solved, which filters depend on;
    (1, 1) is uniform."""
    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the episodes that end without a reward."""

    def episode_tokens(self, max_answer_tokens: float) -> tuple[float, float]:
        """Return the mean number of tokens of an episode and the mean of its square, estimated from random draws.
        Answers are cut to ``max_answer_tokens`` tokens."""
        rng = np.random.default_rng(0)

        def drawn(spread: Spread) -> Draws:
            """Return draws of one quantity, shape [N]."""
            return spread.draw(rng, MEAN_DRAWS)

        turns_N = np.maximum(np.rint(drawn(self.turns)), 1.0)
        answers_N = np.minimum(drawn(self.answer_tokens), max_answer_tokens)
        tokens_N = drawn(self.prompt_tokens) + turns_N * answers_N + (turns_N - 1) * drawn(self.observed_tokens)
        return float(tokens_N.mean()), float((tokens_N**2).mean())


class DrawBuffer:
    """A buffer of random draws from a distribution. It draws thousands of values at a time and returns them one by one,
    because single draws are slow."""

    def __init__(
        self, spread: Spread, rng: np.random.Generator, *, limit: float = math.inf, whole: bool = True
    ) -> None:
        """Create a buffer of draws from ``spread`` by the generator ``rng``. Draws above ``limit`` become ``limit``;
        with ``whole`` they are rounded to integers of at least 1."""
        self._spread, self._rng, self._limit, self._whole = spread, rng, limit, whole
        self._drawn: list[float] = []
        """Draws that were not returned yet, in reverse order."""

    def next(self) -> float:
        """Return the next draw."""
        if not self._drawn:
            drawn_N = np.minimum(self._spread.draw(self._rng, 4096), self._limit)
            self._drawn = (np.maximum(np.rint(drawn_N), 1.0) if self._whole else drawn_N).tolist()[::-1]
        return self._drawn.pop()


class WorkloadDraws:
    """All random draws of a simulated run's workload. Each quantity is drawn from a generator of its own, so that more
    draws of one quantity do not change the others. Only failures and rewards share a generator."""

    def __init__(self, workload: Workload, streams: Sequence[np.random.Generator], *, max_new_tokens: float) -> None:
        """Create the buffers of draws from the distributions of ``workload``. ``streams`` has at least 8 generators.
        Answers longer than ``max_new_tokens`` are cut."""
        self.prompts = DrawBuffer(workload.prompt_tokens, streams[0])
        """Number of tokens of a task's prompt."""
        self.answers = DrawBuffer(workload.answer_tokens, streams[1], limit=max_new_tokens)
        """Number of tokens of one answer."""
        self.turns = DrawBuffer(workload.turns, streams[2])
        """Number of answers of an episode."""
        self.observed = DrawBuffer(workload.observed_tokens, streams[3], whole=False)
        """Number of tokens between two answers, such as tool results. It may be 0, and is not rounded to 1 or more."""
        self.turn_s = DrawBuffer(workload.turn_s, streams[4], whole=False)
        """Seconds between two answers, spent by tools or the environment."""
        self.reward_s = DrawBuffer(workload.reward_s, streams[5], whole=False)
        """Seconds that the reward of an episode takes."""
        self._uniform = DrawBuffer(Uniform(low=0.0, high=1.0), streams[6], whole=False)
        """Numbers from 0 to 1, which decide whether an episode fails, and otherwise its reward."""
        self._chances, self._solved = streams[7], workload.solved
        """The generator of the tasks' probabilities of being solved, and the parameters (a, b) of their Beta
        distribution."""
        self._failed_share = workload.failed_share
        """Fraction of the episodes that end without a reward."""

    def chance(self) -> float:
        """Draw the probability with which one attempt at a new task solves it, from the Beta distribution of the
        workload. :meth:`reward` takes this probability."""
        return float(self._chances.beta(*self._solved))

    def reward(self, chance: float) -> float | None:
        """Draw the reward of an episode. With the probability ``failed_share`` of the workload, the episode fails and
        the reward is ``None``. Otherwise it is 1 with probability ``chance``, and else 0."""
        if self._failed_share and self._uniform.next() < self._failed_share:
            return None
        return float(self._uniform.next() < chance)
