"""RAE: each agent is compared with its own running mean."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, Scope
from headrace.algo.advantages.outcomes import Floats, Outcomes


class Rae(AdvantageSection):
    """b ← α·b + (1 − α)·R, then R − b, per agent, in the order of the episodes. A group of one is defined.

    Without ``agents`` there is one agent; without ``baselines`` each starts at 0, so every batch has to be given those
    that the one before it ended with (:meth:`follow`).
    Source: Liu et al. (SPIRAL), arXiv 2506.24119, eq. 4 and 5.
    """

    kind: Literal["rae"] = "rae"
    """Selects this advantage."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """α: how much of the running mean is kept at each episode."""
    scope: ClassVar[Scope] = "batch"
    stateful: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"agents", "baselines"})

    @property
    def compares_siblings(self) -> bool:
        """A running mean is the baseline."""
        return False

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        credit_E, _ = self.follow(outcomes)
        return credit_E

    def follow(self, outcomes: Outcomes) -> tuple[Floats, Floats]:
        """The credit of every episode, and the baseline of every agent after them: what the next batch starts from."""
        agents_E = np.zeros(len(outcomes.rewards_E), np.int64) if outcomes.agents_E is None else outcomes.agents_E
        num_agents = int(agents_E.max()) + 1 if len(agents_E) else 0
        baselines = np.zeros(num_agents) if outcomes.baselines is None else outcomes.baselines.copy()
        credit_E = np.zeros(len(agents_E))
        for episode in np.flatnonzero(outcomes.counted_E):
            agent, reward = agents_E[episode], outcomes.rewards_E[episode]
            baselines[agent] = self.decay * baselines[agent] + (1 - self.decay) * reward
            credit_E[episode] = reward - baselines[agent]
        return credit_E, baselines
