"""The masks of answers that have a structure: what they exclude, and how they follow their rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.base.types.sampling import Sampling
from headrace.engine.native.masks import Masks

MASKED = Sampling(max_new_tokens=4, structure="anything")


class Ascending:
    """Allows ids above the last one, and knows three ids of a vocabulary that has four."""

    def __init__(self) -> None:
        self.last = -1

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.arange(3) > self.last

    def accept(self, token: int) -> None:
        self.last = token


def finite(masks: Masks, num_rows: int) -> list[list[bool]]:
    logits_DV = masks.apply(torch.zeros(num_rows, 4), np.arange(num_rows))
    return torch.isfinite(logits_DV).tolist()


def test_rows_follow_their_answers_and_ids_that_a_mask_does_not_know_are_excluded() -> None:
    masks = Masks(lambda description: Ascending())
    masks.add(0, Sampling(max_new_tokens=4), np.zeros(0, np.int32))
    masks.add(1, MASKED, np.zeros(0, np.int32))
    masks.add(2, MASKED, np.array([1], np.int32))
    assert finite(masks, 3) == [[True] * 4, [True, True, True, False], [False, False, True, False]]
    masks.append(torch.tensor([3, 0, 2]), np.arange(3))
    assert finite(masks, 3) == [[True] * 4, [False, True, True, False], [False] * 4]
    masks.move(np.array([2]), np.array([0]), 2)
    assert finite(masks, 2) == [[False] * 4, [False, True, True, False]]
    masks.add(0, Sampling(max_new_tokens=4), np.zeros(0, np.int32))
    masks.move(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
    assert not masks.any()
