"""Losses with PPO's clipped surrogate, over the ratio of each token or of a whole sequence.

A loss is a record of settings (``[algo.loss]``). It is called with the columns of a micro-batch and returns one value
per token, to be minimised; a reduction sums the values later. π is the policy in training, r = π/π_old, A the
advantage; ``log_ratio_N()`` is log r. N tokens, S samples (sequences).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from headrace.algo.base import LossInputs, TokenLoss
from headrace.algo.losses.section import PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class ClippedLoss(PolicyLoss):
    """The settings of the clipped surrogate that PPO and its variants share, over a ratio of tokens or of sequences:
    −min(min(r, δ)·A, clip(r, 1−ε, 1+ε_h)·A), δ = ``ratio_cap``."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε: the ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=0.2, ge=0)
    """ε_h: the ratio is clipped from above at 1 + ``clip_high``."""
    dual_clip: float | None = Field(default=None, gt=1)
    """c: where A < 0, the value of a token is at most −c·A (3 is usual); unset: no such bound."""
    ratio_cap: float | None = Field(default=None, gt=0)
    """δ of two-sided clipping: the unclipped r is at most δ, also where A < 0. If the clipped r is larger than δ there,
    it is used, so that a δ below 1 + ``clip_high`` only bounds A > 0; unset: no such bound."""

    def surrogate(self, ratio_N: Tensor, advantages_N: Tensor) -> TokenLoss:
        """Return the clipped surrogate of every token, from its ratio ``ratio_N`` (of the token or of its sequence) and
        its advantage, with the mask of the tokens whose gradient is 0 because of a bound."""
        up_N, down_N = advantages_N > 0, advantages_N < 0
        low, high = 1 - self.clip_low, 1 + self.clip_high
        cap = math.inf if self.ratio_cap is None else self.ratio_cap
        capped_N = ratio_N if self.ratio_cap is None else ratio_N.clamp(max=cap)
        tokens_N = -(capped_N * advantages_N).minimum(ratio_N.clamp(low, high) * advantages_N)
        cut_N = (up_N & (ratio_N > min(cap, high))) | (down_N & ((ratio_N < low) | (ratio_N > max(cap, high))))
        if self.dual_clip is not None:
            tokens_N = tokens_N.minimum(-self.dual_clip * advantages_N).where(down_N, tokens_N)
            cut_N |= down_N & (ratio_N > self.dual_clip)
        return TokenLoss(tokens_N=tokens_N, clipped_N=cut_N)

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the clipped surrogate of its ratio π/π_old and its advantage."""
        return self.surrogate(inputs.log_ratio_N().exp(), inputs.advantages_N)


class SequenceLoss(ClippedLoss):
    """The clipped surrogate over one ratio for each sequence."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the clipped surrogate of its sequence's ratio, the geometric mean of π/π_old
        over the tokens in the mask, and its advantage."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N())
        return self.surrogate(log_s_S.exp()[inputs.samples_N], inputs.advantages_N)


class Grpo(ClippedLoss):
    """GRPO's loss: PPO's clipped surrogate, for advantages that are relative to the group and need no critic.

    −min(r·A, clip(r, 1−ε, 1+ε_h)·A), r = π/π_old per token; where A < 0 and a dual clip c is set, at most −c·A.

    Source: Schulman et al., arXiv 1707.06347, eq. 7; Shao et al., arXiv 2402.03300, eq. 3; dual clip: Ye et al.,
    arXiv 1912.09729, eq. 5; two-sided cap: INTELLECT-2, arXiv 2505.07291, eq. 2.
    """

    kind: Literal["grpo"] = "grpo"
    """The name that selects this loss."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"


class Dapo(ClippedLoss):
    """DAPO's loss: GRPO's loss with a higher upper clip, and the same weight for every token of the batch.

    −min(r·A, clip(r, 1−ε, 1+ε_h)·A) with ε_h > ε, averaged over the tokens of the batch.

    Source: Yu et al., arXiv 2503.14476, eq. 8 and 10.
    """

    kind: Literal["dapo"] = "dapo"
    """The name that selects this loss."""
    clip_high: float = Field(default=0.28, ge=0)
    """ε_h: the ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "token_mean"


class DrGrpo(ClippedLoss):
    """Dr. GRPO's loss: GRPO's loss without the two normalisations that favour short correct answers and long wrong
    ones.

    −min(r·A, clip(r, 1−ε, 1+ε_h)·A), summed over tokens and divided by a constant; its advantage is R − mean.

    Set ``normalizer`` of the reduction to the largest number of tokens of an answer. With its default of 1 the loss is
    a sum over tokens, and its gradient grows with the length of the answers.

    Source: Liu et al., arXiv 2503.20783, section 3.2.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"
    """The name that selects this loss."""
    reduction: ClassVar[str] = "constant"


class Luspo(SequenceLoss):
    """LUSPO's loss: GSPO's loss with sequences weighted by their length, so that short answers are not favoured.

    −min(s·A, clip(s, 1−ε, 1+ε_h)·A)·|y|, s = exp(mean over the sequence of log r), r = π/π_old.

    The factor |y| results from the reduction: the sum over tokens of a value that is equal for all tokens of a
    sequence.
    Source: LUSPO, arXiv 2602.05261.
    """

    kind: Literal["luspo"] = "luspo"
    """The name that selects this loss."""
    clip_low: float = Field(default=2e-3, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=2.5e-3, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_sum"


class Aspo(PolicyLoss):
    """ASPO's loss: the importance ratio of tokens with a positive advantage is inverted, so that tokens that have
    become less likely have a larger weight.

    A > 0: −sg(min(1/r, c))·A·π/sg(π), no gradient where r > 1+ε_h; A < 0: −clip(r, 1−ε, c)·A, the dual clip.

    Source: Wang et al., arXiv 2510.06062 (ratios of positive tokens inverted, soft dual clip); r = π/π_old.
    """

    kind: Literal["aspo"] = "aspo"
    """The name that selects this loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """ε: where A < 0, a ratio below 1 − ``clip_low`` has no gradient."""
    clip_high: float = Field(default=0.2, ge=0)
    """ε_h: where A > 0, a ratio above 1 + ``clip_high`` has no gradient."""
    dual_clip: float = Field(default=3.0, gt=1)
    """c, the largest weight of a token, inverted or not."""

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token. The weight is the inverse of the ratio for a positive advantage, otherwise
        the ratio, and both are bounded. The result includes the mask of the tokens at a bound."""
        log_r_N, advantages_N = inputs.log_ratio_N(), inputs.advantages_N
        ratio_N, inverse_N = log_r_N.exp(), (-log_r_N.detach()).exp()
        above_N, below_N = ratio_N > 1 + self.clip_high, ratio_N < 1 - self.clip_low
        # 1 in value, with the gradient of the ratio; constant above the clip, so that there is no gradient
        unit_N = (log_r_N - log_r_N.detach()).exp().masked_fill(above_N, 1.0)
        rise_N = -inverse_N.clamp(max=self.dual_clip) * unit_N * advantages_N
        fall_N = -ratio_N.clamp(1 - self.clip_low, self.dual_clip) * advantages_N
        up_N = advantages_N > 0
        cut_N = above_N.where(up_N, below_N | (ratio_N > self.dual_clip))
        return TokenLoss(tokens_N=rise_N.where(up_N, fall_N), clipped_N=cut_N)


class Gspo(SequenceLoss):
    """GSPO's loss: one length-normalised ratio per sequence, since there is one reward per sequence.

    −min(s·A, clip(s, 1−ε, 1+ε_h)·A), s = exp(mean over the sequence of log r), r = π/π_old.

    Source: Zheng et al., arXiv 2507.18071, eq. 5 and 7; clip range from section 5.1.
    """

    kind: Literal["gspo"] = "gspo"
    """The name that selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"


class GspoToken(ClippedLoss):
    """GSPO-token: the value of the sequence ratio with the gradient of each token's own ratio, for advantages that
    differ between tokens.

    −min(s_t·A_t, clip(s_t, 1−ε, 1+ε_h)·A_t), s_t = sg(s)·π/sg(π), s = exp(mean over the sequence of log r).

    Source: Zheng et al., arXiv 2507.18071, eq. 13 and 14.
    """

    kind: Literal["gspo_token"] = "gspo_token"
    """The name that selects this loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """ε: the sequence ratio is clipped from below at 1 − ``clip_low``."""
    clip_high: float = Field(default=4e-4, ge=0)
    """ε_h: the sequence ratio is clipped from above at 1 + ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token: the clipped surrogate of a ratio with the value of its sequence's ratio and
        the gradient of the token's own log π."""
        log_s_S = inputs.mean_S(inputs.log_ratio_N().detach())
        one_N = (inputs.log_pi_N - inputs.log_pi_N.detach()).exp()
        return self.surrogate(log_s_S.exp()[inputs.samples_N] * one_N, inputs.advantages_N)


class Gmpo(PolicyLoss):
    """GMPO's loss: the geometric mean of clipped token ratios, which a single extreme token cannot dominate.

    −A·exp(mean over the sequence of l), l = log r, bounded above by ε_h where A > 0 and below by −ε where A < 0.

    A is the mean of the sequence's advantages; r = π/π_old. Source: Zhao et al., arXiv 2507.20673, eq. 4.
    """

    kind: Literal["gmpo"] = "gmpo"
    """The name that selects this loss."""
    clip_low: float = Field(default=0.4, ge=0)
    """ε: the log-ratio is clipped from below at −``clip_low``."""
    clip_high: float = Field(default=0.4, ge=0)
    """ε_h: the log-ratio is clipped from above at ``clip_high``."""
    reduction: ClassVar[str] = "sequence_mean_token_mean"

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of every token, which is the same for all tokens of a sequence: the geometric mean of the
        clipped token ratios times the mean advantage, negated. The result includes the mask of the clipped tokens."""
        log_r_N = inputs.log_ratio_N()
        advantages_S = inputs.mean_S(inputs.advantages_N)
        up_N, down_N = (advantages_S > 0)[inputs.samples_N], (advantages_S < 0)[inputs.samples_N]
        bounded_N = log_r_N.clamp(max=self.clip_high).where(
            up_N, log_r_N.clamp(min=-self.clip_low).where(down_N, log_r_N)
        )
        tokens_S = -advantages_S * inputs.mean_S(bounded_N).exp()
        cut_N = (up_N & (log_r_N > self.clip_high)) | (down_N & (log_r_N < -self.clip_low))
        return TokenLoss(tokens_N=tokens_S[inputs.samples_N], clipped_N=cut_N)
