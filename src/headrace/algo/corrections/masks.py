"""Corrections that keep or drop tokens and sequences: factors that multiply the loss of each token, without gradient.

A correction is a record of settings (``[[algo.correction]]``). It is called with the columns of a micro-batch. π is the
policy in training, μ the policy that sampled the token, ρ = π_old/μ; ``log_rho_N`` is log ρ. N tokens, S samples
(sequences).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic
from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs, log_ratio
from headrace.algo.corrections.section import CorrectionSection, Level, compute_log_rho, keep_sequences, refuse_crossed

if TYPE_CHECKING:
    from torch import Tensor


class Icepop(CorrectionSection):
    """IcePop, also called masked importance sampling: a ratio inside a band is the weight, and tokens with a ratio
    outside the band are dropped.

    ρ where low ≤ ρ ≤ high, else 0; ρ = π_old/μ of the token, its product or geometric mean over the sequence.

    Source: Ling team, arXiv 2510.18855, eq. 3; MIS: Liu et al. (2025), "When speed kills stability".
    """

    kind: Literal["icepop"] = "icepop"
    """The name that selects this correction."""
    low: float = Field(default=0.5, ge=0)
    """The smallest weight of a token that is not dropped."""
    high: float = Field(default=5.0, gt=0)
    """The largest weight of a token that is not dropped."""
    level: Level = "token"
    """The ratio of a token: its own, the product over its sequence, or the geometric mean over its sequence."""
    weighs: ClassVar[bool] = True

    _has_a_band = pydantic.model_validator(mode="after")(refuse_crossed)

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: its ratio ρ at the chosen level, or 0 if that is outside the band."""
        rho_N = compute_log_rho(self.level, inputs).exp()
        return Factor(tokens_N=rho_N.masked_fill((rho_N < self.low) | (rho_N > self.high), 0.0))


class GeometricRejection(CorrectionSection):
    """The rejection of whole sequences by their mean log-ratio.

    1 for every token of a sequence if low ≤ (Πρ)^{1/T} ≤ high, else 0; ρ = π_old/μ.

    Source: Liu et al. (2025), "When speed kills stability", geometric-level masking.
    """

    kind: Literal["geometric_rejection"] = "geometric_rejection"
    """The name that selects this correction."""
    low: float = Field(default=0.999, ge=0)
    """The smallest geometric mean of a sequence that is not dropped."""
    high: float = Field(default=1.001, gt=0)
    """The largest geometric mean of a sequence that is not dropped."""

    _has_a_band = pydantic.model_validator(mode="after")(refuse_crossed)

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: 1 if the geometric mean of ρ over its sequence is within the bounds, else
        0."""
        mean_S = inputs.mean_S(inputs.log_rho_N()).exp()
        return keep_sequences(inputs, (mean_S >= self.low) & (mean_S <= self.high))


class K3Rejection(CorrectionSection):
    """The rejection of tokens or sequences by the k3 estimate of their divergence from μ.

    1 where k3 ≤ high, else 0; k3 = ρ − 1 − log ρ, ρ = π_old/μ, of the token or as mean over its sequence.

    k3 is never negative, so that deviations of both signs add up. Source: Schulman (2020), "Approximating KL
    divergence".
    """

    kind: Literal["k3_rejection"] = "k3_rejection"
    """The name that selects this correction."""
    high: float = Field(default=0.01, gt=0)
    """The largest divergence of a token or sequence that is not dropped."""
    level: Literal["token", "sequence"] = "sequence"
    """Whether to reject single tokens or whole sequences."""

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: 1 if the k3 divergence of the token, or the mean over its sequence, is at
        most ``high``, else 0."""
        log_rho_N = inputs.log_rho_N()
        k3_N = log_rho_N.expm1() - log_rho_N
        if self.level == "sequence":
            return keep_sequences(inputs, inputs.mean_S(k3_N) <= self.high)
        return Factor(tokens_N=(k3_N <= self.high).to(k3_N.dtype))


class Opsm(CorrectionSection):
    """Off-policy sequence masking: sequences with a negative advantage are dropped if the policy has moved away from
    them.

    0 for every token of a sequence iff its A < 0 and its mean log(μ/π) > δ, else 1. A is the mean over the sequence.

    Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
    """

    kind: Literal["opsm"] = "opsm"
    """The name that selects this correction."""
    delta: float = Field(default=1e-4, ge=0)
    """δ, the mean log-ratio above which a sequence with a negative advantage is dropped."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Return the column that the correction reads: log μ."""
        return frozenset({"log_mu"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: 0 if its sequence has a negative mean advantage and its mean log(μ/π) is
        above δ, else 1."""
        drift_S = inputs.mean_S(log_ratio(inputs.log_mu_N, inputs.log_pi_N.detach()))
        blamed_S = inputs.mean_S(inputs.advantages_N) < 0
        return keep_sequences(inputs, ~(blamed_S & (drift_S > self.delta)))


class Outlier(CorrectionSection):
    """The rejection of sequences that contain a token with an extreme ratio.

    0 for every token of a sequence in which any ρ = π_old/μ is outside [low, high], else 1.

    Such a ratio is a sign of an error (a different tokenisation, a corrupt cache), not of a changed policy. Source:
    PRIME-RL, outlier masking.
    """

    kind: Literal["outlier"] = "outlier"
    """The name that selects this correction."""
    low: float = Field(default=1e-4, ge=0)
    """The smallest ratio that a token may have."""
    high: float = Field(default=100.0, gt=0)
    """The largest ratio that a token may have."""
    corrects: ClassVar[bool] = False

    _has_a_band = pydantic.model_validator(mode="after")(refuse_crossed)

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: 0 if any token of its sequence has a ρ outside the bounds, else 1."""
        rho_N = inputs.log_rho_N().exp()
        strange_N = ((rho_N < self.low) | (rho_N > self.high)).to(rho_N.dtype)
        return keep_sequences(inputs, inputs.sum_S(strange_N) == 0)


class TrustRegion(CorrectionSection):
    """A band of allowed log-ratios that becomes narrower with the token's age.

    ρ where |log ρ| ≤ δ·γ^age, else 0; ρ = π_old/μ.

    Tokens of older weights have to agree more closely. γ = 1 corresponds to icepop with a symmetric band of log ρ.
    """

    kind: Literal["trust_region"] = "trust_region"
    """The name that selects this correction."""
    delta: float = Field(default=1.0, gt=0)
    """δ, half the width of the band of log ρ at age 0."""
    decay: float = Field(default=0.9, gt=0, le=1)
    """γ, the factor by which the band narrows per version."""
    weighs: ClassVar[bool] = True

    def columns(self) -> frozenset[Column]:
        """Return the columns that the correction reads: log π_old, log μ and versions."""
        return super().columns() | {"versions"}

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: its ρ, or 0 if log ρ is outside the band, which is narrower for older
        tokens."""
        log_rho_N = inputs.log_rho_N()
        ages_N = inputs.ages_N().clamp(min=0).to(log_rho_N.dtype)
        width_N = self.delta * (ages_N * math.log(self.decay)).exp()
        return Factor(tokens_N=log_rho_N.exp().masked_fill(log_rho_N.abs() > width_N, 0.0))


class Age(CorrectionSection):
    """A weight that depends on a token's age only.

    γ^age where age ≤ max_age, else 0. Tokens of one answer have different ages if weights changed during the answer.

    It does not correct any ratio, but reduces the weight of old tokens. Source: masked prefixes of partial rollouts
    (SLIME).
    """

    kind: Literal["age"] = "age"
    """The name that selects this correction."""
    decay: float = Field(default=1.0, gt=0, le=1)
    """γ, the factor by which a token's weight decreases per version."""
    max_age: int | None = Field(default=None, ge=0)
    """The largest age of a token that is trained on; unset: any age."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Return the column that the correction reads: versions."""
        return frozenset({"versions"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: γ to the power of its age, or 0 if it is older than ``max_age``."""
        ages_N = inputs.ages_N().clamp(min=0)
        weights_N = (ages_N.to(inputs.log_pi_N.dtype) * math.log(self.decay)).exp()
        return Factor(tokens_N=weights_N if self.max_age is None else weights_N.masked_fill(ages_N > self.max_age, 0.0))


class TopEntropy(CorrectionSection):
    """The selection of the tokens with the highest entropy, where the policy's choice has the most influence.

    1 for the fraction of the batch's tokens with the highest entropy, else 0. Tokens of equal entropy are not divided.

    The denominator remains that of all tokens. Source: Wang et al. ("Beyond the 80/20 rule"), arXiv 2506.01939, eq. 5.
    """

    kind: Literal["top_entropy"] = "top_entropy"
    """The name that selects this correction."""
    fraction: float = Field(default=0.2, gt=0, le=1)
    """The fraction of the batch's tokens that is trained on; at least one token is."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """Return the columns that the correction reads: entropies, and the tokens that :meth:`select` selects."""
        return frozenset({"entropy", "selected"})

    def select(self, whole: LossInputs) -> Tensor:
        """Return the mask (N, bool) of the fraction of the tokens of the batch ``whole`` with the highest entropy.
        Tokens with the lowest selected entropy are all selected."""
        assert whole.entropy_N is not None
        entropies = whole.entropy_N[whole.mask_N]
        if not len(entropies):
            return whole.mask_N
        least = entropies.topk(max(1, int(self.fraction * len(entropies)))).values[-1]
        return whole.entropy_N >= least

    def __call__(self, inputs: LossInputs) -> Factor:
        """Return the factor of every token: 1 if :meth:`select` has selected it, else 0."""
        assert inputs.selected_NP is not None
        return Factor(tokens_N=inputs.selected_NP[:, 0].to(inputs.log_pi_N.dtype))
