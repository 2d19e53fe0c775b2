"""Corrections: weights and masks that multiply any loss. A new one is a file here and a row of ``AnyCorrection``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.corrections.age import Age
from headrace.algo.corrections.decoupled import Decoupled
from headrace.algo.corrections.geometric_rejection import GeometricRejection
from headrace.algo.corrections.icepop import Icepop
from headrace.algo.corrections.k3_rejection import K3Rejection
from headrace.algo.corrections.loglinear import Loglinear
from headrace.algo.corrections.opsm import Opsm
from headrace.algo.corrections.outlier import Outlier
from headrace.algo.corrections.sequence_tis import SequenceTis
from headrace.algo.corrections.tis import Tis
from headrace.algo.corrections.top_entropy import TopEntropy
from headrace.algo.corrections.trust_region import TrustRegion

AnyCorrection = (
    Tis
    | Decoupled
    | SequenceTis
    | Icepop
    | GeometricRejection
    | K3Rejection
    | Opsm
    | Outlier
    | Loglinear
    | TrustRegion
    | Age
    | TopEntropy
)
CorrectionConfig = Annotated[AnyCorrection, Field(discriminator="kind")]

__all__ = ["AnyCorrection", "CorrectionConfig", "Tis"]
