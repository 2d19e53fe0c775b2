"""The array types of token-aligned columns: one number per token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int32]
FloatColumn = npt.NDArray[np.float32]
