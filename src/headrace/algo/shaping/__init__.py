"""Shaping: what is added to a reward before it becomes credit. A new one is a file here and a row of ``AnyShaping``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace.algo.shaping.length import Length
from headrace.algo.shaping.overlong import Overlong

AnyShaping = Overlong | Length
ShapingConfig = Annotated[AnyShaping, Field(discriminator="kind")]

__all__ = ["AnyShaping", "ShapingConfig"]
