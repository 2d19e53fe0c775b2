"""A micro-batch as one rank sees it.

Shape legend: M tokens of the micro-batch, L tokens of it that this rank computes, P tokens that carry loss and whose
logits are computed here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.learner.packing import Index
from headrace.learner.parallel.context import ContextPlan, Pieces, gather_shared
from headrace.learner.parallel.mesh import Ranks
from headrace.models.attention import PLAN, PackedPlan, Plan


class View:
    """Its tokens on this rank, and how what is computed of them comes together again."""

    def __init__(self, lengths_K: Index, loss_P: Index, ranks: Ranks) -> None:
        self._ranks = ranks
        self._num_tokens = int(lengths_K.sum())
        num_parts = ranks.config.context
        pieces = Pieces(self._num_tokens, num_parts)
        self._mine = pieces.of(ranks.part)
        self._plan: Plan
        if num_parts == 1:
            self._plan = PackedPlan(lengths_K, ranks.device)
        else:
            self._plan = ContextPlan(lengths_K, pieces, ranks.context_group, ranks.device)
        owned = [np.isin(loss_P - 1, pieces.of(part)) for part in range(num_parts)]
        self._places = [loss_P[of_part] for of_part in owned]
        """The loss tokens whose logits each part computes: a token comes from the logits of the one before it."""
        self._most = max(len(places) for places in self._places)

    @property
    def places_P(self) -> Index:
        """Where, in the micro-batch, the loss tokens lie whose logits are computed here; ascending."""
        return self._places[self._ranks.part]

    def inputs(self, ids_M: Index) -> dict[str, Any]:
        """What the model is called with."""
        mine = np.zeros(len(self._plan.positions_N), np.int64)
        mine[: len(self._mine)] = self._mine
        ids_L = torch.from_numpy(ids_M[mine].astype(np.int64)).to(self._ranks.device)
        return {"input_ids": ids_L[None], "position_ids": self._plan.positions_N[None], PLAN: self._plan}

    def before_P(self) -> Tensor:
        """Where, among this rank's tokens, their logits come from."""
        return torch.from_numpy(np.searchsorted(self._mine, self.places_P - 1)).to(self._ranks.device)

    def join(self, column_P: Tensor) -> Tensor:
        """What was computed of those tokens, on every rank, as a column of the micro-batch (M,); 0 elsewhere."""
        joined_P = column_P
        kept = [np.arange(len(self.places_P))]
        if len(self._places) > 1:
            padding = column_P.new_zeros(self._most - len(column_P))
            joined_P = gather_shared(torch.cat([column_P, padding]), self._ranks.context_group)
            kept = [part * self._most + np.arange(len(places)) for part, places in enumerate(self._places)]
        taken, put = (torch.from_numpy(np.concatenate(index)).to(column_P.device) for index in (kept, self._places))
        return column_P.new_zeros(self._num_tokens).index_copy(0, put, joined_P.index_select(0, taken))
