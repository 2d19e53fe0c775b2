"""Forms that send each tensor unchanged, or rounded to a shorter number format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cast:
    """A form that rounds floating-point tensors to ``dtype`` as torch does (to nearest, ties to even). Others are
    unchanged.

    >>> Cast(torch.bfloat16).parts("weight", torch.zeros(2, 3))["weight"].dtype
    torch.bfloat16
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return {name: torch.empty(tensor.shape, dtype=dtype, device="meta")}

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        parts[0].copy_(tensor)

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(parts[0])


class IdentityForm:
    """A form that sends every tensor unchanged, bit for bit."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor}

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        parts[0].copy_(tensor)

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(parts[0])
