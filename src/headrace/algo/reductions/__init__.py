"""Reductions: how token losses become one number. A new one is a file here and a row of ``Reduction``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.reductions.constant import Constant
from headrace.algo.reductions.prompt_mean import PromptMean
from headrace.algo.reductions.sequence_mean_token_mean import SequenceMeanTokenMean
from headrace.algo.reductions.sequence_mean_token_sum import SequenceMeanTokenSum
from headrace.algo.reductions.token_mean import TokenMean

AnyReduction = TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | Constant | PromptMean
ReductionConfig = Annotated[AnyReduction, Field(discriminator="kind")]

__all__ = [
    "AnyReduction",
    "Constant",
    "PromptMean",
    "ReductionConfig",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "TokenMean",
]
