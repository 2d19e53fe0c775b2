"""Allocation of page-aligned memory for large arrays, such as the weights of a model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PAGE = 4096
"""The alignment of the memory, in bytes: the size of a memory page, which is a multiple of a cache line."""


def zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an array of ``num_bytes`` zero bytes that begins at a page boundary. Pages that are never written use no
    memory. NumPy requests large pages from the system, from which weights are read about 1.5 times as fast.

    >>> zeros(100).shape, zeros(100).ctypes.data % PAGE
    ((100,), 0)
    """
    # allocate one page more than requested, so that a page boundary lies within the first page
    padded = np.zeros(num_bytes + PAGE, np.uint8)
    start = -padded.ctypes.data % PAGE
    return padded[start : start + num_bytes]
