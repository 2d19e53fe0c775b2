"""The environment of the agents benchmark: a writer agent, and a critic agent that answers the writer.

The length limit of each answer is drawn from a lognormal distribution with a 90th percentile of 5.5 times the
median.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from headrace.rollout.environments.policy import Episode, EpisodePolicy
from headrace.wings.bench.user_code import odd

MEDIAN, LONGEST = 16, 1024
"""The median and the largest value of the length limit, in tokens."""
SIGMA = math.log(5.5) / 1.2815515655446004
"""The standard deviation of the logarithm of the limit; the divisor is the 90th percentile of the standard normal
distribution."""


def draw_length(draws: random.Random) -> int:
    """Return the length limit of one answer in tokens, drawn with ``draws`` from the lognormal distribution and cut to
    the range 1 to :data:`LONGEST`."""
    return min(LONGEST, max(1, round(MEDIAN * math.exp(SIGMA * draws.gauss(0.0, 1.0)))))


async def play_episode(task: Mapping[str, Any], policy: EpisodePolicy) -> Episode:
    """Sample with ``policy`` an answer of the writer to the prompt of ``task``, and then an answer of the critic to the
    writer; return the episode with a reward for each of the two agents. This is the rollout function of the benchmark.
    The random length limits depend on the seed of the episode alone, so that two runs with the same seed have the same
    lengths."""
    draws = random.Random(policy.seed)
    written = await policy.chat(task["prompt"], agent="writer", max_new_tokens=draw_length(draws))
    judged = await policy.chat(written.message.content or "?", agent="critic", max_new_tokens=draw_length(draws))
    rewards = {"writer": odd(written.message.content), "critic": odd(judged.message.content)}
    return Episode(agent_rewards=rewards)
