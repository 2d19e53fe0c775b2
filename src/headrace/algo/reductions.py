"""Reductions: rules that combine the losses of tokens into one number. A new reduction is a class and a row of
``AnyReduction``. A reduction returns a weight for each token and the denominator: the loss is Σ weight · token /
denominator over the batch. N tokens, S samples; a *sequence* consists of the samples of one rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from headrace.algo.base import BatchLayout, Shares
from headrace.base.config import Section
from headrace.base.config.kinds import Kinds

if TYPE_CHECKING:
    from torch import Tensor


def count_tokens_by_owner(owners_S: Tensor, layout: BatchLayout) -> tuple[Tensor, Tensor]:
    """Return, for every token of ``layout``, the number of tokens in the mask that its owner has, and the number of
    owners with such tokens.

    ``owners_S`` is the owner of each sample, its episode or its group, as any integers. An owner without tokens in the
    mask is not counted.
    """
    mask_N = layout.mask_N.float()
    owners, index_S = owners_S.unique(return_inverse=True)
    owners_N = index_S[layout.samples_N]
    counts = mask_N.new_zeros(len(owners)).index_add(0, owners_N, mask_N)
    return counts[owners_N].clamp(min=1.0), (counts > 0).sum().float()


class TokenMean(Section):
    """The mean over the tokens of the batch.

    Σ_tokens x / number of tokens. Source: Yu et al., arXiv 2503.14476, eq. 8.
    """

    kind: Literal["token_mean"] = "token_mean"
    """The name that selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1 for every token in the mask, with the number of these tokens as the denominator."""
        mask_N = layout.mask_N.float()
        return Shares(weights_N=mask_N, mass=mask_N.sum())


class SequenceMeanTokenMean(Section):
    """The mean over sequences of the mean over the tokens of each sequence.

    1/S Σ_sequences (Σ_tokens x / tokens of the sequence). The samples of one rollout are one sequence.

    Source: Shao et al., arXiv 2402.03300, eq. 3.
    """

    kind: Literal["sequence_mean_token_mean"] = "sequence_mean_token_mean"
    """The name that selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1 / (number of tokens of its sequence) for every token in the mask, with the number of
        sequences as the denominator."""
        tokens_N, num_episodes = count_tokens_by_owner(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float() / tokens_N, mass=num_episodes)


class SequenceMeanTokenSum(Section):
    """The mean over sequences of the sum over the tokens of each sequence.

    1/S Σ_sequences Σ_tokens x. The samples of one rollout are one sequence.

    Source: Liu et al., arXiv 2503.20783, eq. 2.
    """

    kind: Literal["sequence_mean_token_sum"] = "sequence_mean_token_sum"
    """The name that selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1 for every token in the mask, with the number of sequences as the denominator."""
        _, num_episodes = count_tokens_by_owner(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float(), mass=num_episodes)


class ConstantDivisor(Section):
    """The sum over tokens, divided by a constant, so that a token's weight does not depend on lengths.

    1/S Σ_sequences (Σ_tokens x / L) with a constant L. The samples of one rollout are one sequence.

    Source: Liu et al. (Dr. GRPO), arXiv 2503.20783, appendix A, where L is the generation budget.
    """

    kind: Literal["constant"] = "constant"
    """The name that selects this reduction."""
    normalizer: float = Field(default=1.0, gt=0)
    """L, the constant. The largest number of tokens of an answer is a value that gives losses of the usual size."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1/L for every token in the mask, with the number of sequences as the denominator."""
        _, num_episodes = count_tokens_by_owner(layout.episodes_S, layout)
        return Shares(weights_N=layout.mask_N.float() / self.normalizer, mass=num_episodes)


class PromptMean(Section):
    """The mean over prompts of the mean over the tokens of each prompt.

    1/P Σ_prompts (Σ_tokens of its rollouts x / their number).

    Source: Khatri et al. (ScaleRL), arXiv 2510.13786, section 3.2.
    """

    kind: Literal["prompt_mean"] = "prompt_mean"
    """The name that selects this reduction."""

    def __call__(self, layout: BatchLayout) -> Shares:
        """Return the weight 1 / (number of tokens of its prompt) for every token in the mask, with the number of
        prompts as the denominator."""
        tokens_N, num_groups = count_tokens_by_owner(layout.groups_S, layout)
        return Shares(weights_N=layout.mask_N.float() / tokens_N, mass=num_groups)


AnyReduction = TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | ConstantDivisor | PromptMean
REDUCTIONS = Kinds(AnyReduction, group="headrace.reductions", setting="algo.reduction", contract=Section)
"""The registry of reductions, including those of installed packages."""
ReductionConfig = Annotated[AnyReduction, REDUCTIONS]
