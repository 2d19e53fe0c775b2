"""Several updates of the weights from one batch: in each epoch, its groups are divided into mini-batches, with one
update for each.

    batch ─▶ columns, log π before the first update ─┬─▶ epoch 0: mini-batch ─▶ update, mini-batch ─▶ update ...
                                                     └─▶ epoch 1: another random division ...

The token weights of a mini-batch are normalised over its own tokens. π_old of all updates is the learner before the
first update (or μ, or kept weights, as ``algo.old`` sets). All updates of a batch make one version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from headrace.algo.base import Ratio
from headrace.algo.metrics import off_policy
from headrace.algo.objective import Objective
from headrace.base.types.tokens import FloatColumn
from headrace.learner.intake import layout
from headrace.learner.packing import MicroBatch
from headrace.learner.work import MicroBatchStats, StepWork, TokenStats

_BEFORE_STEP_PREFIXES = ("mismatch_", "stale_")
"""The prefixes of metrics that compare the learner before the step with the policy that sampled the tokens."""


def add_log_old(work: StepWork, log_before_N: FloatColumn) -> StepWork:
    """Return ``work`` with log π_old for all updates. ``log_before_N`` is log π under the weights before the first
    update."""
    before_N = torch.from_numpy(log_before_N)
    if work.old == "learner":
        return replace(work, log_old_N=before_N)
    if work.old == "sampled" and work.log_old_N is not None:
        return replace(work, log_old_N=torch.where(work.log_old_N.isnan(), before_N, work.log_old_N))
    return work


def minibatches(work: StepWork, objective: Objective) -> Iterator[StepWork]:
    """Yield the work of each update of a step. In each epoch the groups of the batch are divided at random into
    mini-batches, by a seed of step and epoch; only the tokens of the mini-batch carry loss. A mini-batch without a loss
    token is skipped."""
    batch = work.batch
    groups_N = np.repeat(batch.groups_S, batch.lengths_S)
    for epoch in range(objective.epochs):
        shuffled_groups = np.random.default_rng([batch.step, epoch]).permutation(np.unique(batch.groups_S))
        for groups in np.array_split(shuffled_groups, objective.minibatches):
            mask_N = work.mask_N & np.isin(groups_N, groups)
            if mask_N.any():
                weights_N = objective.weights(layout(batch, torch.from_numpy(mask_N)))
                yield replace(work, mask_N=mask_N, weights_N=weights_N, metrics={})


def stats_of_updates(parts: Sequence[MicroBatchStats], work: StepWork, log_before_N: FloatColumn) -> MicroBatchStats:
    """Return the statistics of a step of several updates. ``parts`` are the statistics of the updates. Token statistics
    count each token once, before the first update; other metrics are aggregated over all updates. ``log_before_N`` is
    log π of each token of ``work`` before the first update."""
    batch, places_L = work.batch, np.flatnonzero(work.mask_N)
    before = off_policy(
        work.inputs(MicroBatch.whole(batch.lengths_S), torch.from_numpy(log_before_N)), torch.from_numpy(log_before_N)
    )
    own = TokenStats(
        log_pi_L=log_before_N[places_L],
        log_mu_L=batch.logprobs_N[places_L],
        ages_L=batch.step - batch.versions_N[places_L].astype(np.int64),
        places_L=places_L.astype(np.int32),
    )
    return MicroBatchStats.combine_updates(parts, work, _select_comparisons(before), own)


def _select_comparisons(metrics: dict[str, Ratio]) -> dict[str, Ratio]:
    """Return the subset of ``metrics`` that compare the learner with the policy that sampled the tokens."""
    return {name: ratio for name, ratio in metrics.items() if name.startswith(_BEFORE_STEP_PREFIXES)}
