"""Versions: the integers that name sets of weights.

Version 0 is what the run starts from; version ``n`` is what the learner holds after ``n`` optimizer steps. A token that
was computed while weights were being exchanged one by one has no single version: it is *mixed* between two, and counts
as the older one wherever an age matters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOT_SAMPLED = -1
"""The version of a token that no policy sampled: prompts, tool results, templates."""

FROZEN = 2**31 - 1
"""The version of a token that an agent with frozen weights sampled: they are none of the run's, and never age."""

INITIAL = 0
"""The version of the weights that a run starts from."""


def mixed(older: int) -> int:
    """The version of a token computed by weights of ``older`` and of a later version.

    >>> mixed(0), mixed(7)
    (-2, -9)
    """
    return -2 - older


def oldest(versions_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The oldest version behind each token.

    >>> oldest(np.array([-1, 5, mixed(4)], np.int32)).tolist()
    [-1, 5, 4]
    """
    return np.where(versions_T < NOT_SAMPLED, -2 - versions_T, versions_T).astype(np.int32)
