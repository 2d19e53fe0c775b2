"""An advantage."""

from __future__ import annotations

from typing import Literal

import numpy as np

from headrace.algo.advantages.base import centered
from headrace.extend import AdvantageSection


class Sign(AdvantageSection):
    """+1 above the mean of the group, −1 below it."""

    kind: Literal["sign"] = "sign"
    """Selects this advantage."""

    def __call__(self, outcomes):
        """The credit of every episode."""
        return np.sign(centered(outcomes))
