"""Two agents whose answers have heavy-tailed lengths, for the benchmark of agents.

A writer, and a critic who reads what was written. How long an answer may be is drawn anew for each of them: lognormal,
the 90th percentile somewhat over five times the median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from headrace.rollout.environments.policy import Episode, EpisodePolicy

MEDIAN, LONGEST = 16, 1024
SIGMA = math.log(5.5) / 1.2815515655446004
"""Over the 90th percentile of a normal variable."""


def length(draws: random.Random) -> int:
    """Of one answer, in tokens."""
    return min(LONGEST, max(1, round(MEDIAN * math.exp(SIGMA * draws.gauss(0.0, 1.0)))))


def earned(text: str) -> float:
    """Something that differs: the share of the first half of the alphabet."""
    return sum(ord(character) % 2 for character in text) / max(1, len(text))


async def play(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """One answer each, the second after the first."""
    draws = random.Random(policy.seed)
    written = await policy.chat(task["prompt"], agent="writer", max_new_tokens=length(draws))
    judged = await policy.chat(written.message.content or "?", agent="critic", max_new_tokens=length(draws))
    rewards = {"writer": earned(written.message.content), "critic": earned(judged.message.content)}
    return Episode(agent_rewards=rewards)
