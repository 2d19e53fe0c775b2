"""Credit by turn: each turn is compared with other turns taken in the same state."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.algo.advantages.base import AdvantageSection, joint, leave_one_out, total
from headrace.algo.advantages.outcomes import Floats, Ints, Outcomes


class Step(AdvantageSection):
    """R_episode − mean of the others + ω·(G − mean of the other G in the same state), G = Σ γ^k r from the turn on.

    A row is a turn, in order of time; ``episodes`` says of which episode (left out: each is its own), ``states`` in
    which state it was taken (left out: its place in the episode). A state seen once gives no step credit.
    Source: Feng et al. (GiGPO), arXiv 2505.10978, eq. 5–9, with leave-one-out means.
    """

    kind: Literal["step"] = "step"
    """Selects this advantage."""
    gamma: float = Field(default=0.95, ge=0, le=1)
    """γ: discount per turn of the returns that are compared."""
    weight: float = Field(default=1.0, ge=0)
    """ω: weight of the step credit beside the episode's."""
    reads: ClassVar[frozenset[str]] = frozenset({"episodes", "states"})
    by_turn: ClassVar[bool] = True

    def __call__(self, outcomes: Outcomes) -> Floats:
        """The credit of every episode."""
        rows = np.arange(len(outcomes.rewards_E))
        episodes_E = rows if outcomes.episodes_E is None else outcomes.episodes_E
        returns_E, places_E = self._returns(outcomes.values_E, episodes_E)
        states_E = places_E if outcomes.states_E is None else outcomes.states_E
        keys_E = joint(outcomes.groups_E, states_E)
        step_E = leave_one_out(returns_E, outcomes.counted_E, keys_E)
        _, first, owners_E = np.unique(episodes_E, return_index=True, return_inverse=True)
        whole_E = total(outcomes.values_E, episodes_E)[first]
        counted_E = total(outcomes.counted_E.astype(np.float64), episodes_E)[first] > 0
        episode_E = leave_one_out(whole_E, counted_E, outcomes.groups_E[first])[owners_E]
        return (episode_E + self.weight * step_E) * outcomes.counted_E

    def _returns(self, values_E: Floats, episodes_E: Ints) -> tuple[Floats, Ints]:
        """The discounted return from each turn on, and its place in its episode."""
        returns_E, places_E = np.zeros(len(values_E)), np.zeros(len(values_E), np.int64)
        later: dict[int, float] = {}
        earlier: dict[int, int] = {}
        for row, episode in enumerate(episodes_E.tolist()):
            places_E[row] = earlier[episode] = earlier.get(episode, -1) + 1
        for row in range(len(values_E) - 1, -1, -1):
            episode = int(episodes_E[row])
            returns_E[row] = later[episode] = values_E[row] + self.gamma * later.get(episode, 0.0)
        return returns_E, places_E
