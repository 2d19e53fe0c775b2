"""Engine and learner are asked the same question before the first rollout: how far apart are their logprobs?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import msgspec
import numpy as np

from headrace.control.board import Board
from headrace.control.parts import Parts
from headrace.env import SingleTurn
from headrace.rollout import EpisodeRunner
from headrace.rollout.agents import Agents
from headrace.types.batch import Batch, TrainSample
from headrace.types.episode import EpisodeKey
from headrace.types.scored import paths

NUM_PROBES = 8
MAX_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The gap between engine and learner at equal weights, over sampled tokens."""

    kl: float
    """KL(μ‖π), estimator k3: mean of e^x − 1 − x with x = log π − log μ (Schulman, "Approximating KL divergence")."""
    mean_abs: float
    """Mean |log μ − log π|."""
    num_tokens: int


async def measure_mismatch(parts: Parts, board: Board, *, version: int, run_seed: int) -> Mismatch | None:
    """Sample a few short answers, of each adapter in turn; the learner computes their logprobs. ``None`` if no task
    fits the context."""
    length = min(MAX_PROBE_TOKENS, parts.sampling.max_new_tokens)
    prompts = [task for task in parts.tasks if len(task.prompt_ids_T)]
    runner = EpisodeRunner(
        engine=parts.engine,
        env=SingleTurn() if prompts else parts.env,
        sampling=msgspec.structs.replace(parts.sampling, max_new_tokens=length),
        run_seed=run_seed + 2,  # other draws than training's and evaluation's
        on_tokens=lambda _: board.progress(),
        chat=parts.chat,
        limits=replace(parts.limits, max_turns=1),  # whatever becomes of the episode then
        timeout_s=parts.episode_timeout_s,
    )
    tasks = prompts or parts.tasks
    fitting = [task for task in tasks if len(task.prompt_ids_T) + length <= parts.max_context][:NUM_PROBES]
    agents, samples = parts.agents.adapters, list[TrainSample]()
    for index, (task, agent) in enumerate(zip(fitting, cycle(("", *agents)), strict=False)):
        asked = replace(runner, agents=Agents(posing=agent))
        episode = await asked.run(EpisodeKey(index, 0), task)
        if episode.num_sampled:
            samples += [replace(sample, roles=((agent, len(sample.tokens)),)) for sample in paths(episode, 0.0)]
    if not samples:
        return None
    batch = Batch.collate(version, samples, agents)
    with board.asking("learner", "logprobs to compare", of="the learner"):
        logprobs_N = await parts.learner.logprobs(batch)
    log_pi = logprobs_N[batch.mask_N].astype(np.float64)
    log_mu = batch.logprobs_N[batch.mask_N].astype(np.float64)
    x = np.clip(log_pi - log_mu, -20, 20)
    return Mismatch(
        kl=float(np.mean(np.expm1(x) - x)), mean_abs=float(np.mean(np.abs(x))), num_tokens=int(batch.mask_N.sum())
    )
