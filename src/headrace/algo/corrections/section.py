"""What the corrections' settings have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headrace.algo.base import Column, Factor, LossInputs
from headrace.config import Section

if TYPE_CHECKING:
    from torch import Tensor


class CorrectionSection(Section):
    """A correction that reads log μ and log π_old."""

    weighs: ClassVar[bool] = False
    corrects: ClassVar[bool] = True

    def needs(self) -> frozenset[Column]:
        """The columns it reads beyond the ones that are always there."""
        return frozenset({"log_old", "log_mu"})

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens it chooses from the whole batch."""
        raise NotImplementedError(f"{type(self).__name__} selects no tokens")


def keep_sequences(inputs: LossInputs, keep_S: Tensor) -> Factor:
    """Factor 1 for every token of the samples that are kept, 0 for the others."""
    return Factor(tokens_N=keep_S.to(inputs.log_pi_N.dtype)[inputs.samples_N])
