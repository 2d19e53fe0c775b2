"""From the rewards of a batch to the advantage of each of its episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.algo.advantages import Outcomes
from headrace.algo.config import AlgoConfig
from headrace.types.scored import ScoredGroup


def credit(algo: AlgoConfig, groups: Sequence[ScoredGroup]) -> Sequence[float]:
    """One advantage per episode of the batch that counts in a baseline, in order; not all of them are trained."""
    episodes = [(group.number, episode) for group in groups for episode in group.counted]
    scores = Outcomes(
        rewards_E=np.array([episode.reward for _, episode in episodes], np.float64),
        groups_E=np.array([number for number, _ in episodes], np.int64),
        lengths_E=np.array([episode.num_sampled for _, episode in episodes], np.int64),
    )
    return [float(advantage) for advantage in algo.credit_of_episodes(scores)]
