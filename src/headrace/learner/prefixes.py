"""Samples of one group that begin alike compute their common beginning once.

    prompt ─┬─ answer 0        rows of the forward pass: prompt, answer 0, answer 1, answer 2
            ├─ answer 1
            └─ answer 2        attention of answer 1: to the prompt's keys and values, and its own

The rows of the prompt take part in everything but attention once; their gradients are the sums over the answers.

Shape legend: N tokens of the batch.
"""

from __future__ import annotations

import numpy as np

from headrace.base.types.batch import Batch
from headrace.learner.packing import Index, Unit


def siblings(batch: Batch, samples: Index, budget: int) -> list[Unit]:
    """The chosen ``samples`` as units: those of one group that begin with the same tokens, computed by the same
    experts, as long as they fit in a ``budget`` of rows together."""
    lengths_S = batch.lengths_S.astype(np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    units: list[Unit] = []
    for group in dict.fromkeys(batch.groups_S[samples].tolist()):
        members = np.sort(samples[batch.groups_S[samples] == group])
        prefix = min(
            (_common(batch, starts_S[[members[0], other]], lengths_S[[members[0], other]]) for other in members[1:]),
            default=0,
        )
        while len(members):
            own = lengths_S[members] - prefix
            fits = max(1, int((prefix + np.cumsum(own) <= budget).sum()))
            units.append(Unit(samples=members[:fits], prefix=prefix if fits > 1 else 0))
            members = members[fits:]
    return units


def _common(batch: Batch, starts: Index, lengths: Index) -> int:
    """How many tokens two samples begin with alike."""
    shorter = int(lengths.min())
    one, other = (np.arange(start, start + shorter) for start in starts)
    same = batch.ids_N[one] == batch.ids_N[other]
    if batch.routing is not None:
        first, second = batch.routing.take(one), batch.routing.take(other)
        same &= first.known_T == second.known_T
        both = first.known_T & second.known_T
        same[both] &= (first.experts_RLK[both[first.known_T]] == second.experts_RLK[both[second.known_T]]).all((1, 2))
    return int(np.argmin(same)) if not same.all() else shorter
