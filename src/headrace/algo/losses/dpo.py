"""DPO: learning from pairs, one preferred to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, LossInputs, Ratio, TokenLoss, log_ratio
from headrace.algo.losses.section import LossSection
from headrace.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


class Dpo(LossSection):
    """−log σ(β·(Δ_chosen − Δ_rejected)), Δ = Σ over the sequence of log π/π_ref, for every token of the pair.

    In each group exactly one sample is chosen (advantage above 0) and one rejected (below 0); reduced by prompt, the
    batch's loss is the mean over pairs. Source: Rafailov et al., arXiv 2305.18290, eq. 7.
    """

    kind: Literal["dpo"] = "dpo"
    """Selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """β: how strongly the reference is held."""
    reduction: ClassVar[str] = "prompt_mean"

    def needs(self) -> frozenset[Column]:
        """The reference, and who is compared with whom."""
        return frozenset({"log_ref", "pairs"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.log_ref_N is not None
        assert inputs.groups_S is not None
        groups, pairs_S = inputs.groups_S.unique(return_inverse=True)
        side_S = inputs.mean_S(inputs.advantages_N).sign()
        gap_S = inputs.sum_S(log_ratio(inputs.log_pi_N, inputs.log_ref_N))
        _refuse_unpaired(side_S, pairs_S, len(groups))
        margin_G = self.beta * gap_S.new_zeros(len(groups)).index_add(0, pairs_S, side_S * gap_S)
        loss_G = (-margin_G).logaddexp(margin_G.new_zeros(()))
        won = Ratio((margin_G.detach() > 0).sum(), float(len(groups)))
        return TokenLoss(tokens_N=loss_G[pairs_S][inputs.samples_N], metrics={"dpo_accuracy": won})


def _refuse_unpaired(side_S: Tensor, pairs_S: Tensor, num_groups: int) -> None:
    count = side_S.new_zeros(num_groups).index_add(0, pairs_S, side_S.abs())
    balance = side_S.new_zeros(num_groups).index_add(0, pairs_S, side_S)
    if not bool(((count == 2) & (balance == 0)).all() | (side_S == 0).all()):
        raise DataError(
            "dpo found a group without exactly one chosen and one rejected sample",
            remedy="give pairs: advantage +1 and -1, one of each in every group, in one micro-batch",
        )
