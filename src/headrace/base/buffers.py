"""Memory for many numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PAGE = 4096
"""Bytes; a page begins where a line of the cache begins."""


def zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Bytes that begin where a page begins; those that are never written take no memory. NumPy asks the system for
    large pages, from which weights stream half again as fast.

    >>> zeros(100).shape, zeros(100).ctypes.data % PAGE
    ((100,), 0)
    """
    room = np.zeros(num_bytes + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    return room[start : start + num_bytes]
