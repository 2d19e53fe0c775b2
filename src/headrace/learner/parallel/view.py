"""The part of a micro-batch that one rank computes: all of its tokens, some of them (context parallelism), or none.

Shape legend: M tokens of the micro-batch, R rows on this rank (including padding), P loss tokens whose logits this rank
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.base.types.tokens import IntColumn
from headrace.learner.packing import Index, MicroBatch
from headrace.learner.parallel.context import ContextPlan, Pieces, gather_shared
from headrace.learner.parallel.mesh import AnyRanks, SingleRank
from headrace.models.attention import PLAN, Plan
from headrace.models.packed import PADDED, ChosenAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class _ColumnParts:
    """The places of the parts of a column that several ranks compute, by which the column is joined."""

    group: dist.ProcessGroup
    places: list[Index]
    """For each rank, the indices in the micro-batch of the loss tokens whose logits it computes."""

    def join(self, column_P: Tensor) -> tuple[Index, Tensor]:
        """Gather a column from all ranks of the group; ``column_P`` is this rank's part. Return the indices of the
        entries in the micro-batch, and the entries."""
        most = max(len(places) for places in self.places)
        padding = column_P.new_zeros(most - len(column_P), *column_P.shape[1:])
        joined = gather_shared(torch.cat([column_P, padding]), self.group)
        kept = np.concatenate([part * most + np.arange(len(places)) for part, places in enumerate(self.places)])
        return np.concatenate(self.places), joined.index_select(0, torch.from_numpy(kept).to(joined.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """The rows that one rank computes for a micro-batch, and the conversion of its results to columns of the
    micro-batch."""

    micro: MicroBatch
    """The whole micro-batch."""
    plan: Plan
    """The plan of the attention over the rows of this rank."""
    rows_R: Index
    """The index in the micro-batch of each row's token; empty if this rank only joins the collectives of other
    ranks."""
    before_P: Index
    """The indices of the rows whose logits predict the loss tokens: the rows of the tokens before them."""
    places_P: Index
    """The indices of these loss tokens in the micro-batch, ascending."""
    parts: _ColumnParts | None
    """The places of the parts of all ranks; ``None`` if this rank computes the whole micro-batch."""

    @property
    def rows_in_batch(self) -> Index:
        """Return the index of the token of each row in the batch's columns."""
        return self.micro.places_M[self.rows_R]

    def inputs(self, ids_N: IntColumn) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward pass. ``ids_N`` are the ids of the whole batch."""
        positions_R = self.plan.positions_N
        ids_R = np.zeros(len(positions_R), np.int64)
        ids_R[: len(self.rows_R)] = ids_N[self.rows_in_batch]
        ids = torch.from_numpy(ids_R).to(positions_R.device)
        return {"input_ids": ids[None], "position_ids": positions_R[None], PLAN: self.plan}

    def join(self, column_P: Tensor) -> Tensor:
        """Return the column of the micro-batch ``[M, ...]`` with the values ``column_P`` (a number or a row for each
        loss token), joined from all ranks; 0 for other tokens."""
        places, column = (self.places_P, column_P) if self.parts is None else self.parts.join(column_P)
        at = torch.from_numpy(places).to(column.device)
        return column.new_zeros(len(self.micro.places_M), *column.shape[1:]).index_copy(0, at, column)


def make_rank_view(
    micro: MicroBatch,
    loss_P: Index,
    ranks: AnyRanks,
    attention: ChosenAttention = PADDED,
    filled: Callable[[int], int] = int,
) -> RankView:
    """Return the view of ``micro`` on this rank. ``loss_P`` are the indices in ``micro`` of all its loss tokens. For an
    empty micro-batch, the rank computes one unused token, because ranks gather their parameters together. ``attention``
    is the attention implementation. ``filled`` returns, from the number of rows of a pass on one rank, the number to
    which it is padded by a sequence of unused tokens."""
    idle = not len(micro.places_M)
    lengths_K = np.ones(1, np.int64) if idle else micro.lengths_K
    if not isinstance(ranks, SingleRank) and ranks.config.context > 1:
        pieces = Pieces(int(lengths_K.sum()), ranks.config.context)
        mine = pieces.get_indices(ranks.part)
        places = [loss_P[np.isin(loss_P - 1, pieces.get_indices(part))] for part in range(ranks.config.context)]
        padded = np.concatenate([mine, np.zeros(pieces.per_rank - len(mine), np.int64)])
        return RankView(
            micro=micro,
            plan=ContextPlan(lengths_K, pieces, ranks.context_group, ranks.device, attention.compute),
            rows_R=padded[:0] if idle else padded,
            before_P=np.searchsorted(mine, places[ranks.part] - 1),
            places_P=places[ranks.part],
            parts=_ColumnParts(group=ranks.context_group, places=places),
        )
    if idle:
        return RankView(
            micro=micro,
            plan=attention.plan(lengths_K, ranks.device),
            rows_R=np.zeros(0, np.int64),
            before_P=loss_P,
            places_P=loss_P,
            parts=None,
        )
    rows_M = np.arange(len(micro.places_M)) if micro.rows_M is None else micro.rows_M
    followed_M = np.ones(len(micro.places_M), np.bool_)
    followed_M[np.cumsum(lengths_K) - 1] = False  # no token follows the last token of a sample, so it is not computed
    rows_R, first_R, rows_T = np.unique(rows_M[followed_M], return_index=True, return_inverse=True)
    lengths_K, unused = lengths_K - 1, filled(len(rows_R)) - len(rows_R)
    if unused:
        lengths_K = np.append(lengths_K, unused)
        rows_T = np.append(rows_T, len(rows_R) + np.arange(unused))
    return RankView(
        micro=micro,
        plan=attention.plan(lengths_K, ranks.device, None if micro.rows_M is None else rows_T),
        rows_R=np.flatnonzero(followed_M)[first_R],
        before_P=np.searchsorted(rows_R, rows_M[loss_P - 1]),
        places_P=loss_P,
        parts=None,
    )
