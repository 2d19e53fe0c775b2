"""Training on the tokens where the policy decides something."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs
from headrace.algo.corrections.section import CorrectionSection

if TYPE_CHECKING:
    from torch import Tensor


class TopEntropy(CorrectionSection):
    """1 for the fraction of the batch's tokens with the highest entropy, else 0. Equal entropies are kept together.

    The denominator stays that of all tokens. Source: Wang et al. ("Beyond the 80/20 rule"), arXiv 2506.01939, eq. 5.
    """

    kind: Literal["top_entropy"] = "top_entropy"
    """Selects this correction."""
    fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the batch's tokens that are trained on; at least one."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Entropies, and the tokens chosen by them."""
        return frozenset({"entropy", "selected"})

    def select(self, whole: LossInputs) -> Tensor:
        """The tokens with the highest entropy."""
        assert whole.entropy_N is not None
        entropies = whole.entropy_N[whole.mask_N]
        if not len(entropies):
            return whole.mask_N
        least = entropies.topk(max(1, int(self.fraction * len(entropies)))).values[-1]
        return whole.entropy_N >= least

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        assert inputs.selected_NP is not None
        return Factor(tokens_N=inputs.selected_NP[:, 0].to(inputs.log_pi_N.dtype))
