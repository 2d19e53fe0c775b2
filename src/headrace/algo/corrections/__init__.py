"""Corrections. A new one is a file here and a row of ``AnyCorrection``."""

from __future__ import annotations

from headrace.algo.corrections.tis import Tis

AnyCorrection = Tis
CorrectionConfig = AnyCorrection

__all__ = ["AnyCorrection", "CorrectionConfig", "Tis"]
