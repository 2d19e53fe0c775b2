"""Versions: the integers that name sets of weights.

Version 0 is what the run starts from; version ``n`` is what the learner holds after ``n`` optimizer steps. A token that
was computed while weights were being exchanged one by one has no single version: it is *mixed* between two, and counts
as the older one wherever an age matters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOT_SAMPLED = -1
"""The version of a token that no policy sampled, as in prompts, tool results and templates."""

FROZEN = 2**31 - 1
"""The version of a token that an agent with frozen weights sampled: they are not weights of the run, and never age."""

INITIAL = 0
"""The version of the weights that a run starts from."""


def mixed(older: int) -> int:
    """Return the number that stands for the version of a token that was computed while the weights of version ``older``
    were being replaced by a later version. It is −2 − ``older``, so that it differs from every other version.

    >>> mixed(0), mixed(7)
    (-2, -9)
    """
    return -2 - older


def oldest(versions_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return, for each token, the oldest version of the weights that computed it: a mixed version becomes its older
    one, and any other version, ``NOT_SAMPLED`` included, stays as it is.

    >>> oldest(np.array([-1, 5, mixed(4)], np.int32)).tolist()
    [-1, 5, 4]
    """
    return np.where(versions_T < NOT_SAMPLED, -2 - versions_T, versions_T).astype(np.int32)
