"""Tensors as they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class AsItIs:
    """Every tensor stands for itself, bit for bit."""

    def parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor}

    def write(self, parts: Sequence[Tensor], tensor: Tensor) -> None:
        parts[0].copy_(tensor)

    def read(self, parts: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(parts[0])
