"""The workload of a run: lengths of prompts and answers, and the times of environments and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field, PositiveFloat

from headrace.base.config import Section
from headrace.wings.plan.spread import AnySpread, ConstantSpread, Draws, Lognormal, Spread, Uniform


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


class DrawBuffer:
    """A buffer of draws from a distribution, which are made thousands at a time and returned one by one."""

    def __init__(self, spread: Spread, rng: np.random.Generator, *, most: float = math.inf, whole: bool = True) -> None:
        """Create the buffer. Draws above ``most`` become ``most``; with ``whole`` they are rounded to integers of at
        least 1."""
        self._spread, self._rng, self._most, self._whole = spread, rng, most, whole
        self._drawn: list[float] = []

    def next(self) -> float:
        """Return one draw."""
        if not self._drawn:
            self._drawn = self._draw().tolist()[::-1]
        return self._drawn.pop()

    def _draw(self) -> Draws:
        drawn_N = np.minimum(self._spread.draw(self._rng, 4096), self._most)
        return np.maximum(np.rint(drawn_N), 1.0) if self._whole else drawn_N


class WorkloadDraws:
    """All random draws of a simulated run's workload; each kind has its own random stream."""

    def __init__(self, workload: Workload, streams: Sequence[np.random.Generator], *, max_new_tokens: float) -> None:
        self.prompts = DrawBuffer(workload.prompt_tokens, streams[0])
        self.answers = DrawBuffer(workload.answer_tokens, streams[1], most=max_new_tokens)
        self.turns = DrawBuffer(workload.turns, streams[2])
        self.observed = DrawBuffer(workload.observed_tokens, streams[3], whole=False)
        self.turn_s = DrawBuffer(workload.turn_s, streams[4], whole=False)
        self.reward_s = DrawBuffer(workload.reward_s, streams[5], whole=False)
        self._uniform = DrawBuffer(Uniform(low=0.0, high=1.0), streams[6], whole=False)
        self._chances, self._solved = streams[7], workload.solved
        self._failed_share = workload.failed_share
        """Fraction of the episodes that end without a reward."""

    def chance(self) -> float:
        """Draw the probability that one attempt at a task solves it, for :meth:`reward`."""
        return float(self._chances.beta(*self._solved))

    def reward(self, chance: float) -> float | None:
        """Draw the reward of an episode: 1 with probability ``chance``, the probability that an attempt at its task
        solves it, and 0 otherwise. For the share of the episodes that fail, return ``None``."""
        if self._failed_share and self._uniform.next() < self._failed_share:
            return None
        return float(self._uniform.next() < chance)
