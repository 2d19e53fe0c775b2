"""Corrections: weights and masks that multiply any loss. A new one is a class and a row of ``AnyCorrection``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
from headrace.algo.corrections.weights import Decoupled, Loglinear, SequenceTis, Tis

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
