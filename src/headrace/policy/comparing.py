"""The comparison of a policy's engine with its learner when the policy is opened.

Both have the same weights and must compute the same log-probabilities up to rounding; otherwise samples of the engine
could not be trained. The *probe* is a few sequences of random tokens whose log-probabilities both compute. μ is the
engine's distribution, π the learner's.

Shape legend: N tokens of the probe, S sequences of the probe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.base.errors import RunError
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.tokens import FloatColumn, Tokens
from headrace.models import ModelConfig
from headrace.models.gap import Gap, largest_gap

_LENGTHS = (2, 7, 40)
"""Lengths, in tokens, of the sequences of the probe."""


def probe_tokens(vocab_size: int, longest: int) -> list[Tokens]:
    """Return the sequences of the probe: random ids from the whole vocabulary, at most ``longest`` tokens in each
    sequence. Every call with the same arguments returns the same ids."""
    rng = np.random.default_rng(0)
    lengths = [min(length, longest) for length in _LENGTHS]
    return [Tokens.observed(rng.integers(0, vocab_size, length).astype(np.int32)) for length in lengths]


def probe_batch(step: int, sequences: list[Tokens]) -> Batch:
    """Return the batch with which the learner computes the logprobs of ``sequences``. The mask selects all tokens
    except the first of each sequence, which has no logprob. ``step`` is the version of the learner's weights."""
    samples = [
        TrainSample(key=EpisodeKey(0, place), spans=(tokens,), mask_T=np.arange(len(tokens)) > 0, advantage=0.0)
        for place, tokens in enumerate(sequences)
    ]
    return Batch.collate(step, samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The settings from which the largest gap follows that rounding explains."""

    model: ModelConfig
    """The settings of the model: its number format, and whether it is deterministic."""
    temperature: float
    """Temperature by which engine and learner divide the logits."""
    rerouted: bool
    """Whether the model has experts, so that engine and learner choose experts independently."""

    @property
    def largest(self) -> float:
        """The largest mean |log μ − log π| that rounding explains, in nats; 0 for a deterministic model."""
        if self.model.deterministic:
            return 0.0
        return largest_gap(self.model.dtype, rerouted=self.rerouted, temperature=self.temperature)


def refuse_mismatch(batch: Batch, log_mu_N: FloatColumn, log_pi_N: FloatColumn, settings: ProbeSettings) -> None:
    """Raise :class:`~headrace.base.errors.RunError` if the engine's logprobs of the probe (``log_mu_N``) and the
    learner's (``log_pi_N``) differ more than rounding explains. Both have one entry for each token of ``batch``, and
    are compared where its mask is true. ``settings`` determine how large a difference rounding explains."""
    (compared,) = np.nonzero(batch.mask_N)
    if not len(compared):
        return
    gap = Gap.between(log_mu_N[compared], log_pi_N[compared])
    if gap.within(settings.largest):
        return
    ends_S = np.cumsum(batch.lengths_S)
    sample = int(np.searchsorted(ends_S, compared[gap.worst_index], side="right"))
    position = int(compared[gap.worst_index] - ends_S[sample] + batch.lengths_S[sample])
    raise RunError(
        f"the policy's engine and learner at equal weights: mean |Δ logprob| {gap.mean_abs:.2g}, KL {gap.kl:.2g}, over "
        f"{gap.num_tokens} tokens, and rounding explains {settings.largest:.2g}; the largest is {gap.worst:.2g} at "
        f"token {position} of a sequence of {batch.lengths_S[sample]}: they do not compute the same model",
        remedy="load the policy with engine={'kernels': 'off'} or another model.dtype; where that does not help, "
        "report the model's config.json",
    )
