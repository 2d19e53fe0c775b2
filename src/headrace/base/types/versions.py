"""Versions: the integers that name sets of weights.

A run starts with version 0; version ``n`` is the learner's weights after ``n`` optimizer steps. A token that was
computed while an engine replaced its weights one by one has no single version: its version is *mixed*, and the older
version counts wherever an age is computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NOT_SAMPLED = -1
"""The version of a token that no policy sampled, as in prompts, tool results and templates."""

FROZEN = 2**31 - 1
"""The version of a token that an agent with frozen weights sampled. They are not weights of the run, and have no
age."""

INITIAL = 0
"""The version of the weights that a run starts from."""


def mixed_version(older: int) -> int:
    """Return the number that represents the version of a token that was computed while the weights of version ``older``
    were being replaced by a later version. It is −2 − ``older``, which differs from every other version.

    >>> mixed_version(0), mixed_version(7)
    (-2, -9)
    """
    return -2 - older


def oldest(versions_T: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return, for each token, the oldest version of the weights that computed it: the older version for a mixed
    version; any other version unchanged, ``NOT_SAMPLED`` included.

    >>> oldest(np.array([-1, 5, mixed_version(4)], np.int32)).tolist()
    [-1, 5, 4]
    """
    return np.where(versions_T < NOT_SAMPLED, -2 - versions_T, versions_T).astype(np.int32)
