"""What is asked of a system: how long prompts and answers are, what environments and rewards take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field, PositiveFloat

from headrace.base.config import Section
from headrace.wings.plan.spread import AnySpread, ConstantSpread, Draws, Lognormal, Spread, Uniform


class Workload(Section):
    """The table ``[workload]`` of a cluster file. A spread is a number, or a table with its ``kind``."""

    prompt_tokens: AnySpread = ConstantSpread(value=256)
    """Of a task, template included."""
    answer_tokens: AnySpread = Lognormal(mean=1024, cv=1.0)
    """Of one answer; no answer is longer than ``engine.max_new_tokens``."""
    turns: AnySpread = ConstantSpread(value=1)
    """Answers of an episode."""
    observed_tokens: AnySpread = ConstantSpread(value=0)
    """That come between two answers: results of tools, words of a user."""
    turn_s: AnySpread = ConstantSpread(value=0)
    """Between two answers: tools, the environment."""
    reward_s: AnySpread = ConstantSpread(value=0)
    """Of the reward of an episode."""
    reward_slots: int | None = Field(default=None, ge=1)
    """Rewards that are computed at once; unset: as many as are asked for."""
    solved: tuple[PositiveFloat, PositiveFloat] = (1.0, 1.0)
    """How hard tasks are: each has a chance of being solved that is drawn from Beta(a, b). (1, 1): every chance is as
    likely as any other. Filters look at it."""
    failed_share: float = Field(default=0.0, ge=0, lt=1)
    """Of the episodes, those that end without a reward."""


class Supply:
    """Draws from a spread by the thousand, and gives them out one by one."""

    def __init__(self, spread: Spread, rng: np.random.Generator, *, most: float = math.inf, whole: bool = True) -> None:
        """``whole``: rounded to at least 1."""
        self._spread, self._rng, self._most, self._whole = spread, rng, most, whole
        self._drawn: list[float] = []

    def next(self) -> float:
        """One draw."""
        if not self._drawn:
            self._drawn = self._more().tolist()[::-1]
        return self._drawn.pop()

    def _more(self) -> Draws:
        drawn_N = np.minimum(self._spread.draw(self._rng, 4096), self._most)
        return np.maximum(np.rint(drawn_N), 1.0) if self._whole else drawn_N


class Demand:
    """Everything that a simulated run draws of its workload; each kind from a stream of its own."""

    def __init__(self, workload: Workload, streams: Sequence[np.random.Generator], *, max_new_tokens: float) -> None:
        self.prompts = Supply(workload.prompt_tokens, streams[0])
        self.answers = Supply(workload.answer_tokens, streams[1], most=max_new_tokens)
        self.turns = Supply(workload.turns, streams[2])
        self.observed = Supply(workload.observed_tokens, streams[3], whole=False)
        self.turn_s = Supply(workload.turn_s, streams[4], whole=False)
        self.reward_s = Supply(workload.reward_s, streams[5], whole=False)
        self._luck = Supply(Uniform(low=0.0, high=1.0), streams[6], whole=False)
        self._chances, self._solved, self._failed_share = streams[7], workload.solved, workload.failed_share

    def chance(self) -> float:
        """Of a task, to be solved in one attempt."""
        return float(self._chances.beta(*self._solved))

    def reward(self, chance: float) -> float | None:
        """1 where the task was solved; ``None`` where the episode failed."""
        if self._failed_share and self._luck.next() < self._failed_share:
            return None
        return float(self._luck.next() < chance)
