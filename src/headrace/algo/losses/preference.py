"""Losses over pairs of answers, one of which is preferred to the other. They depend on the difference between the two.

In each group exactly one sample is chosen (advantages above 0) and one rejected (below 0). Every token of a pair has
the value of the pair, so that the reduction ``prompt_mean`` computes the mean over pairs.

A loss is called with the columns of a micro-batch. π is the policy in training, π_ref a reference. Shape legend: N
tokens, S samples, G pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, LossInputs, Ratio, TokenLoss
from headrace.algo.losses.section import LossSection
from headrace.algo.losses.supervised import Dpo
from headrace.base.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The samples of a micro-batch in pairs, which are its groups: each pair has one chosen and one rejected sample."""

    inputs: LossInputs
    """The columns of the micro-batch."""
    pairs_S: Tensor
    """The index of each sample's pair."""
    num_pairs: int
    """The number of pairs G."""
    side_S: Tensor
    """1 for a chosen sample, −1 for a rejected sample."""

    @classmethod
    def from_inputs(cls, inputs: LossInputs) -> Pairs:
        """Return the pairs of the micro-batch ``inputs``. Raises :class:`~headrace.base.errors.DataError` if a group is
        not a pair of one chosen and one rejected sample."""
        assert inputs.groups_S is not None
        groups, pairs_S = inputs.groups_S.unique(return_inverse=True)
        side_S = inputs.sum_S(inputs.advantages_N).sign()
        counts_G = side_S.new_zeros(len(groups)).index_add(0, pairs_S, side_S.abs())
        balance_G = side_S.new_zeros(len(groups)).index_add(0, pairs_S, side_S)
        if not bool(((counts_G == 2) & (balance_G == 0)).all()):
            raise DataError(
                "a loss over pairs found a group without exactly one chosen and one rejected sample",
                remedy="give pairs: advantage +1 and -1, one of each in every group, in one micro-batch",
            )
        return cls(inputs=inputs, pairs_S=pairs_S, num_pairs=len(groups), side_S=side_S)

    def mean_S(self, values_N: Tensor) -> Tensor:
        """Return, for each sample, the mean of ``values_N`` over the tokens of its answer. Tokens of the mask with an
        advantage of 0 belong to a prompt."""
        answers = replace(self.inputs, mask_N=self.inputs.mask_N & (self.inputs.advantages_N != 0))
        return answers.mean_S(values_N)

    def difference_G(self, values_S: Tensor) -> Tensor:
        """Return, for each pair, the value of the chosen sample minus the value of the rejected sample."""
        return values_S.new_zeros(self.num_pairs).index_add(0, self.pairs_S, self.side_S * values_S)

    def loss(self, loss_G: Tensor, margin_G: Tensor) -> TokenLoss:
        """Return the loss with the value ``loss_G`` for every token of a pair, and two metrics: the fraction of pairs
        whose margin (chosen minus rejected) is above 0, and the mean margin."""
        accuracy = Ratio((margin_G.detach() > 0).sum(), float(self.num_pairs))
        margin = Ratio(margin_G.detach().sum(), float(self.num_pairs))
        return TokenLoss(
            tokens_N=loss_G[self.pairs_S][self.inputs.samples_N],
            metrics={"pair_accuracy": accuracy, "pair_margin": margin},
        )


def minus_log_sigmoid(margin: Tensor) -> Tensor:
    """Return −log σ(margin), without overflow for margins of any size."""
    return (-margin).logaddexp(margin.new_zeros(()))


class PairLoss(LossSection):
    """The base class of losses over pairs, whose reduction computes the mean over pairs."""

    reduction: ClassVar[str] = "prompt_mean"

    def columns(self) -> frozenset[Column]:
        """Return the column that the formula reads: the pairs of samples."""
        return frozenset({"pairs"})


class IdentityPo(PairLoss):
    """IPO's loss: a squared error that has its minimum where the difference of the mean log-ratios is 1/(2β).

    (Δ_chosen − Δ_rejected − 1/(2β))², Δ = mean over the answer of log π/π_ref.

    Source: Azar et al., arXiv 2310.12036, eq. 17, with the mean over tokens that its authors used.
    """

    kind: Literal["ipo"] = "ipo"
    """The name that selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """β (τ in the paper), the strength of the regularisation towards the reference."""

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_ref, and the pairs of samples."""
        return frozenset({"log_ref", "pairs"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the loss of its pair: the square of the difference of the mean
        log-ratios minus 1/(2β)."""
        assert inputs.log_ref_N is not None
        pairs = Pairs.from_inputs(inputs)
        margin_G = pairs.difference_G(pairs.mean_S(inputs.log_pi_N - inputs.log_ref_N))
        return pairs.loss((margin_G - 1 / (2 * self.beta)).square(), margin_G)


class SimPo(PairLoss):
    """SimPO's loss: the mean log-probability is the implicit reward, so that no reference is needed.

    −log σ(β·(l_chosen − l_rejected) − γ), l = mean over the answer of log π.

    Source: Meng et al., arXiv 2405.14734, eq. 6.
    """

    kind: Literal["simpo"] = "simpo"
    """The name that selects this loss."""
    beta: float = Field(default=2.0, gt=0)
    """β, the scale of the difference."""
    gamma: float = Field(default=1.0, ge=0)
    """γ, the margin by which the reward of the chosen answer should be larger."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the loss of its pair: −log σ of the scaled difference of the mean
        log π minus the margin γ."""
        pairs = Pairs.from_inputs(inputs)
        margin_G = self.beta * pairs.difference_G(pairs.mean_S(inputs.log_pi_N))
        return pairs.loss(minus_log_sigmoid(margin_G - self.gamma), margin_G)


class Orpo(PairLoss):
    """ORPO's loss: the likelihood of the chosen answer, and the odds of the chosen answer against the rejected one.

    NLL − λ·log σ(log odds_chosen − log odds_rejected), odds = P/(1 − P), log P = mean over the answer of log π; NLL =
    −mean of log π over the chosen sample.

    Source: Hong et al., arXiv 2403.07691, eq. 6 and 7. As in the authors' program, the likelihood includes the tokens
    of the prompt that are in the mask (with advantage 0).
    """

    kind: Literal["orpo"] = "orpo"
    """The name that selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """λ, the weight of the odds ratio."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the loss of its pair: the negative log-likelihood of the chosen
        sample plus λ times the loss of the odds ratio."""
        pairs = Pairs.from_inputs(inputs)
        log_p_S = pairs.mean_S(inputs.log_pi_N)
        # 1 − P is computed with the exact P; the bound keeps the odds finite if P is 1
        log_odds_S = log_p_S - (-log_p_S.clamp(max=-1e-7).exp()).log1p()
        margin_G = pairs.difference_G(log_odds_S)
        chosen_S = pairs.side_S > 0
        nll_S = -inputs.mean_S(inputs.log_pi_N) * chosen_S
        nll_G = nll_S.new_zeros(pairs.num_pairs).index_add(0, pairs.pairs_S, nll_S)
        return pairs.loss(nll_G + self.beta * minus_log_sigmoid(margin_G), margin_G)


class Kto(LossSection):
    """KTO's loss: single answers that are good or bad, without pairs, relative to the policy's mean divergence.

    λ_D·(1 − σ(β·(Δ − z))) for a good answer, λ_U·(1 − σ(β·(z − Δ))) for a bad one, Δ = Σ over the answer of log
    π/π_ref, z = KL(π‖π_ref) of the batch, from answers to other prompts, without gradient.

    Source: Ethayarajh et al., arXiv 2402.01306, eq. 7 and 8.
    """

    kind: Literal["kto"] = "kto"
    """The name that selects this loss."""
    beta: float = Field(default=0.1, gt=0)
    """β, the strength of the regularisation towards the reference."""
    good: float = Field(default=1.0, gt=0)
    """λ_D, the weight of good answers."""
    bad: float = Field(default=1.0, gt=0)
    """λ_U, the weight of bad answers."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def columns(self) -> frozenset[Column]:
        """Return the columns that the formula reads: log π_ref, and the mean divergence of the batch."""
        return frozenset({"log_ref", "baseline"})

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the loss of its sample: a weighted sigmoid of its log-ratio to the
        reference minus the batch's divergence. The metrics are the rewards of good and bad answers."""
        assert inputs.log_ref_N is not None
        assert inputs.baseline is not None
        side_S = inputs.mean_S(inputs.advantages_N).sign()
        gap_S = inputs.sum_S(inputs.log_pi_N - inputs.log_ref_N)
        good_S = side_S > 0
        weight_S = side_S.new_full(side_S.shape, self.bad).masked_fill(good_S, self.good)
        loss_S = weight_S * (-self.beta * side_S * (gap_S - inputs.baseline)).sigmoid()
        reward_S, count = self.beta * gap_S.detach(), float(inputs.num_samples)
        metrics = {
            "kto_baseline": Ratio(inputs.baseline * count, count),
            "kto_good": Ratio(reward_S[good_S].sum(), good_S.sum()),
            "kto_bad": Ratio(reward_S[~good_S].sum(), (~good_S).sum()),
        }
        return TokenLoss(tokens_N=loss_S[inputs.samples_N], metrics=metrics)


AnyPreferenceLoss = Dpo | IdentityPo | Kto | SimPo | Orpo
"""The losses of ``headrace dpo``, by the names in its run file."""
