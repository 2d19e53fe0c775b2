"""Off-policy sequence masking: no blame for answers that the policy has already left."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from headrace.algo.base import Column, Factor, LossInputs, log_ratio
from headrace.algo.corrections.section import CorrectionSection, keep_sequences


class Opsm(CorrectionSection):
    """0 for every token of a sequence iff its A < 0 and its mean log(μ/π) > δ, else 1. A is the mean over the sequence.

    Source: DeepSeek-V3.2, arXiv 2512.02556, eq. 9.
    """

    kind: Literal["opsm"] = "opsm"
    """Selects this correction."""
    delta: float = Field(default=1e-4, ge=0)
    """δ: the mean log-ratio above which a blamed sequence is dropped."""
    corrects: ClassVar[bool] = False

    def columns(self) -> frozenset[Column]:
        """μ alone."""
        return frozenset({"log_mu"})

    def __call__(self, inputs: LossInputs) -> Factor:
        """The factor of every token."""
        drift_S = inputs.mean_S(log_ratio(inputs.log_mu_N, inputs.log_pi_N.detach()))
        blamed_S = inputs.mean_S(inputs.advantages_N) < 0
        return keep_sequences(inputs, ~(blamed_S & (drift_S > self.delta)))
