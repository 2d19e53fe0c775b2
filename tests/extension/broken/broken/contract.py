"""Objects that break their contracts."""

from __future__ import annotations

from typing import Literal

from headrace.extend import LossSection

NUMBER = 7


class NotALoss:
    """It inherits nothing."""


class Misnamed(LossSection):
    """Its kind is another than that of its entry point."""

    kind: Literal["other"] = "other"
