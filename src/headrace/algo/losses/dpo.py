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
    batch's loss is the mean over pairs. A pair of which one side has no token left has loss 0 and is counted
    (``dpo_dropped``). Source: Rafailov et al., arXiv 2305.18290, eq. 7.
    """

    kind: Literal["dpo"] = "dpo"
    """Selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """β: how strongly the reference is held."""
    reduction: ClassVar[str] = "prompt_mean"

    def columns(self) -> frozenset[Column]:
        """The reference, and who is compared with whom."""
        return frozenset({"log_ref", "pairs"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """The value of every token."""
        assert inputs.log_ref_N is not None
        assert inputs.groups_S is not None
        groups, pairs_S = inputs.groups_S.unique(return_inverse=True)
        side_S = inputs.mean_S(inputs.advantages_N).sign()
        gap_S = inputs.sum_S(log_ratio(inputs.log_pi_N, inputs.log_ref_N))
        empty_S = inputs.sum_S(gap_S.new_ones(len(inputs.mask_N))) == 0
        whole_G = _whole(side_S, empty_S, pairs_S)
        margin_G = self.beta * gap_S.new_zeros(len(groups)).index_add(0, pairs_S, side_S * gap_S)
        loss_G = (-margin_G).logaddexp(margin_G.new_zeros(())).masked_fill(~whole_G, 0.0)
        metrics = {
            "dpo_accuracy": Ratio((whole_G & (margin_G.detach() > 0)).sum(), whole_G.sum()),
            "dpo_dropped": Ratio((~whole_G).sum(), float(len(groups))),
        }
        return TokenLoss(tokens_N=loss_G[pairs_S][inputs.samples_N], metrics=metrics)


def _whole(side_S: Tensor, empty_S: Tensor, pairs_S: Tensor) -> Tensor:
    """The groups with one chosen and one rejected sample; :class:`DataError` where none of the others is empty."""
    num_groups = int(pairs_S.max()) + 1 if len(pairs_S) else 0
    count_G, balance_G, empty_G = (
        side_S.new_zeros(num_groups).index_add(0, pairs_S, values_S.to(side_S.dtype))
        for values_S in (side_S.abs(), side_S, empty_S)
    )
    whole_G = (count_G == 2) & (balance_G == 0)
    if not bool((whole_G | ((empty_G > 0) & (count_G < 2))).all()):
        raise DataError(
            "dpo found a group without exactly one chosen and one rejected sample",
            remedy="give pairs: advantage +1 and -1, one of each in every group, in one micro-batch",
        )
    return whole_G
