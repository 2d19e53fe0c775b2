"""The comparison of engine and learner before the first rollout: it measures the gap between their logprobs at equal
weights, which must not be larger than rounding explains. μ is the engine's distribution, π the learner's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import msgspec
import numpy as np

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.scored import paths
from headrace.base.types.tokens import FloatColumn
from headrace.control.board import ActivityBoard
from headrace.control.parts import Components
from headrace.models.gap import Gap
from headrace.rollout.agents import Agents
from headrace.rollout.environments import SingleTurn

NUM_PROBES = 8
"""Maximum number of answers that are compared."""
MAX_PROBE_TOKENS = 64
"""Maximum number of tokens of each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The gap between the logprobs of engine and learner at equal weights, over sampled tokens."""

    gap: Gap
    """The figures of the gap."""
    worst: str
    """The position of the token with the largest difference, in words."""

    @property
    def text(self) -> str:
        """Return the figures of the gap as text for the beginning of a message."""
        gap = self.gap
        return (
            f"engine and learner at equal weights: mean |Δ logprob| {gap.mean_abs:.2g}, KL {gap.kl:.2g}, over "
            f"{gap.num_tokens} tokens"
        )


def refuse_unexplained(mismatch: Mismatch, largest: float) -> None:
    """Raise :class:`~headrace.base.errors.RunError` if the mean gap is larger than ``largest``, the mean |Δ logprob| in
    nats that rounding explains or the user accepts."""
    if mismatch.gap.within(largest):
        return
    raise RunError(
        f"{mismatch.text}, and rounding explains {largest:.2g}; the largest is {mismatch.gap.worst:.2g} at "
        f"{mismatch.worst}: they do not compute the same model",
        remedy="give the engine the directory of model.path, in model.dtype; a server that runs already, "
        "engine.server.urls, may have been started with another model, or with other settings of it. Where the engine "
        "rounds more than the run file says, set run.max_start_gap to what that explains",
    )


async def measure_mismatch(parts: Components, board: ActivityBoard, *, version: int, run_seed: int) -> Mismatch | None:
    """Measure the gap between engine and learner at equal weights: sample up to :data:`NUM_PROBES` short answers, using
    the adapters in turn; let the learner compute the logprobs of the same tokens; and return the gap. Return ``None``
    if no task fits into the context. ``parts`` are the components of the run and ``run_seed`` its seed; ``version`` is
    the version of the weights; ``board`` shows the wait for the learner."""
    length = min(MAX_PROBE_TOKENS, parts.sampling.max_new_tokens)
    sampling = msgspec.structs.replace(parts.sampling, max_new_tokens=length)
    # without kept-sets the learner normalises over the whole vocabulary, so the engine must too
    if sampling.truncated and not sampling.record_kept:
        sampling = msgspec.structs.replace(sampling, top_k=0, top_p=1.0, min_p=0.0, structure="")
    prompts = [task for task in parts.tasks if len(task.prompt_ids_T)]
    seed = run_seed + 2  # other random numbers than training and evaluation
    runner = replace(
        parts.make_runner(seed, lambda _: board.record_progress()),
        env=SingleTurn() if prompts else parts.env,
        sampling=sampling,
        limits=replace(parts.limits, max_turns=1),  # the first answer of an episode is enough
        retries=0,
    )
    tasks = prompts or parts.tasks
    fitting = [task for task in tasks if len(task.prompt_ids_T) + length <= parts.max_context][:NUM_PROBES]
    agents, samples = parts.agents.adapters, list[TrainSample]()
    for index, (task, agent) in enumerate(zip(fitting, cycle(("", *agents)), strict=False)):
        agent_runner = replace(runner, agents=Agents(stand_in=agent))
        episode = await agent_runner.run(EpisodeKey(index, 0), task)
        if episode.num_sampled:
            samples += [replace(sample, roles=((agent, sample.num_tokens),)) for sample in paths(episode, 0.0)]
    if not samples:
        return None
    batch = Batch.collate(version, samples, agents)
    with board.requesting("learner", "logprobs to compare", provider="the learner"):
        logprobs_N = await parts.learner.logprobs(batch)
    return _measure_mismatch(batch, logprobs_N)


def _measure_mismatch(batch: Batch, logprobs_N: FloatColumn) -> Mismatch | None:
    """Return the gap between the engine's logprobs in ``batch`` and the learner's logprobs ``logprobs_N``. Tokens
    without a finite logprob of the engine are skipped, as in every loss; ``None`` if there are no other tokens."""
    (tokens,) = np.nonzero(batch.mask_N & np.isfinite(batch.logprobs_N))
    if not len(tokens):
        return None
    gap = Gap.between(batch.logprobs_N[tokens], logprobs_N[tokens])
    ends_S = np.cumsum(batch.lengths_S)
    sample = int(np.searchsorted(ends_S, tokens[gap.worst_index], side="right"))
    position = int(tokens[gap.worst_index] - ends_S[sample] + batch.lengths_S[sample])
    return Mismatch(gap=gap, worst=f"token {position} of the {batch.lengths_S[sample]} of sequence {sample}")
