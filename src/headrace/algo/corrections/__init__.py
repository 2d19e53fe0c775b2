"""Corrections: weights and masks that multiply any loss. A new correction is a class and a row of ``AnyCorrection``."""

from __future__ import annotations

from typing import Annotated

from headrace.algo.corrections.masks import (
    Age,
    GeometricRejection,
    Icepop,
    K3Rejection,
    Opsm,
    Outlier,
    TopEntropy,
    TrustRegion,
)
from headrace.algo.corrections.section import CorrectionSection
from headrace.algo.corrections.weights import Decoupled, Loglinear, SequenceTis, Tis
from headrace.base.config.kinds import Kinds

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
CORRECTIONS = Kinds(AnyCorrection, group="headrace.corrections", setting="algo.correction", contract=CorrectionSection)
"""The registry of corrections, including those of installed packages."""
CorrectionConfig = Annotated[AnyCorrection, CORRECTIONS]

__all__ = ["AnyCorrection", "CorrectionConfig", "Tis"]
