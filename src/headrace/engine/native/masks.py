"""The masks of structured answers: the tokens that may come next in each row whose request has a structure (a JSON
schema or a regular expression, for example). A row is the index of a running sequence in the batch.

The engine does not interpret structures: a request contains the description of its structure as a text, and the
engine's :data:`MaskMaker` converts it to a mask, which is updated with each token of the answer. Tokens that the mask
excludes get the logit −inf after bias and penalties, before temperature and truncation. Logprobs, kept-sets and
entropies are therefore computed from the masked distribution.

Shape legend: V vocabulary, D rows that draw in this step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.base.types.columns import IntColumn
from headrace.base.types.sampling import Sampling

V = TypeVar("V")


class TokenMask(Protocol):
    """The mask of one answer: it returns which tokens may come next, and is updated with each sampled token."""

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return for each token id, from 0, whether it may come next; ids beyond the end of the array may not."""
        ...

    def accept(self, token: int) -> None:
        """Update the mask with the sampled ``token``, which was allowed."""
        ...


MaskMaker = Callable[[str], TokenMask]
"""A function that makes the mask of a new answer from the description of its structure. Raises
:class:`~headrace.base.errors.RequestError` for an invalid description."""


def move_rows(rows: dict[int, V], sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], count: int) -> None:
    """Move the values of the rows ``sources`` in ``rows`` to the rows ``targets``, and remove the values of rows from
    ``count`` on. Not every row has a value."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        moved = rows.pop(source, None)
        rows.pop(target, None)
        if moved is not None:
            rows[target] = moved
    for row in [row for row in rows if row >= count]:
        del rows[row]


class Masks:
    """The masks of all rows of the batch, made by ``make`` from the requests' structures. Rows without a structure cost
    nothing."""

    def __init__(self, make: MaskMaker) -> None:
        """Start without a mask in any row. ``make`` makes the mask of each new answer that has a structure."""
        self._make = make
        self._rows: dict[int, TokenMask] = {}
        """The masks, by row."""

    def any(self) -> bool:
        """Return whether any row has a mask."""
        return bool(self._rows)

    def has(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each of ``rows`` whether it has a mask."""
        return np.array([row in self._rows for row in rows.tolist()], bool)

    def add(self, row: int, sampling: Sampling, answer_ids_T: IntColumn) -> None:
        """Set up ``row`` for a sequence that joins the batch with the parameters ``sampling``. ``answer_ids_T`` are the
        tokens that it has sampled already; the mask is advanced past them."""
        self._rows.pop(row, None)
        if sampling.structure:
            mask = self._rows[row] = self._make(sampling.structure)
            for token in answer_ids_T.tolist():
                mask.accept(token)

    def move(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], count: int) -> None:
        """Move the rows ``sources`` to the indices ``targets``, after other rows have left; ``count`` rows are in use
        now."""
        move_rows(self._rows, sources, targets, count)

    def apply(self, logits_DV: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the logits of ``rows`` with −inf at every token that may not come next; ``logits_DV`` itself is not
        changed."""
        masked = [(place, self._rows[row]) for place, row in enumerate(rows.tolist()) if row in self._rows]
        if not masked:
            return logits_DV
        excluded_DV = np.zeros(logits_DV.shape, bool)
        for place, mask in masked:
            allowed_V = mask.allowed()[: logits_DV.shape[1]]
            excluded_DV[place] = True
            excluded_DV[place, : len(allowed_V)] = ~allowed_V
        return logits_DV.masked_fill(torch.from_numpy(excluded_DV).to(logits_DV.device), -torch.inf)

    def append(self, ids_D: Tensor, rows: npt.NDArray[np.int64]) -> None:
        """Update the masks of ``rows`` with ``ids_D``, the tokens just sampled for them."""
        if any(row in self._rows for row in rows.tolist()):
            for row, token in zip(rows.tolist(), ids_D.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].accept(token)
