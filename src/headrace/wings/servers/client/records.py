"""Decoders of the records that a server reports for each token beside its logprob: its kept-set (the token ids that
remained after truncated sampling) and the experts that computed it. The server's data are not trusted, so they are
checked.

Shape legend: N tokens, H layers of a model, L mixture-of-experts layers among them, K experts per token and layer.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.base.types.recorded import Experts
from headrace.models.routing import RoutedModel

HEADER_BYTES = 1024
"""Largest size of the header of a numpy file, in bytes. The header is parsed as Python, and a deeply nested one would
crash the parser."""


class RoutingDecoder:
    """A decoder of the experts that a server reports for each token, for one model with ``num_layers`` layers. Only
    some of the layers may have experts."""

    def __init__(self, routed: RoutedModel, num_layers: int) -> None:
        """Create a decoder. ``routed`` describes the experts of the model, and says which layers have experts."""
        self._routed, self._num_layers = routed, num_layers
        self._depths = [layer.depth for layer in routed.layers]
        """Index of each mixture-of-experts layer among all layers of the model."""

    def convert(self, reported: npt.NDArray[Any], count: int) -> Experts:
        """Convert the array that a server has ``reported`` for ``count`` tokens: check it, and keep the layers that
        have experts. ``reported`` covers all H layers, and is flat or of shape ``[N, H, K]``; the result has the shape
        ``[N, L, K]``. Raises ``ValueError`` if the experts cannot come from this model."""
        shape = (count, self._num_layers, self._routed.top_k)
        if reported.shape not in (shape, (math.prod(shape),)):
            raise ValueError(f"experts of shape {reported.shape}, expected {shape}")
        if reported.size and not 0 <= reported.min() <= reported.max() < self._routed.num_experts:
            raise ValueError(f"experts from {reported.min()} to {reported.max()} of {self._routed.num_experts}")
        experts_NHK = reported.reshape(shape)
        experts_NLK: Experts = experts_NHK[:, self._depths].astype(self._routed.dtype)
        if problem := self._routed.problem(experts_NLK):
            raise ValueError(problem)
        return experts_NLK


def refuse_kept(kept: Sequence[Sequence[int]], ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``ValueError`` if the tokens ``ids`` cannot have been drawn from the kept-sets ``kept``. Each token must be
    in its own set, and the ids of a set must ascend and be below ``vocab_size``."""
    if len(kept) != len(ids):
        raise ValueError(f"{len(kept)} kept-sets for {len(ids)} tokens")
    for token, span in zip(ids, kept, strict=True):
        if token not in span or any(a >= b for a, b in itertools.pairwise(span)):
            raise ValueError(
                f"token {token} with a kept-set of {len(span)} that does not contain it or is not ascending"
            )
        if span[-1] >= vocab_size:
            raise ValueError(f"a kept-set with {span[-1]}, outside the vocabulary of {vocab_size}")


def numbers(text: str) -> npt.NDArray[np.int32]:
    """Decode the base64 ``text`` of an array of 32-bit integers. Raises ``ValueError`` for an invalid text."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.int32)


def decode_array(text: str) -> npt.NDArray[Any]:
    """Decode ``text``, a numpy file of an integer array in base64. Raises ``ValueError`` for an invalid text. The
    memory used is bounded by the size of the file.

    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(6, dtype=np.uint8).reshape(2, 3))
    >>> decode_array(base64.b64encode(file.getvalue()).decode()).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    file = io.BytesIO(base64.b64decode(text, validate=True))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("an array in a format that is not known")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=HEADER_BYTES)
    data = file.read()
    if fortran or dtype.kind not in "ui" or int(np.prod(shape, dtype=object)) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} in {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)
