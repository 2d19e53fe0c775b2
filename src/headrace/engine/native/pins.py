"""Copies of older weights for pinned sequences: one copy per version, kept while a sequence needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Pins:
    """At most ``most`` copies of the model's weights.

    ``tensors`` are the model's parameters. During a pass under older weights they point to a copy.
    """

    def __init__(self, tensors: Iterable[Tensor], most: int) -> None:
        self._most = most
        self._tensors = list(tensors)
        self._copies: dict[int, list[Tensor]] = {}
        self._holders: dict[int, set[int]] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of all copies."""
        each = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return each * len(self._copies)

    def may_hold(self, version: int) -> bool:
        """Return whether ``version`` has a copy or there is room for one."""
        return version in self._copies or len(self._copies) < self._most

    def move(self, device: torch.device) -> None:
        """Move the copies to ``device``."""
        for version, tensors in self._copies.items():
            self._copies[version] = [tensor.to(device) for tensor in tensors]

    def hold(self, version: int, holder: int) -> None:
        """Keep ``version`` for ``holder``. The first call for a version copies the weights that the model has at that
        time."""
        if version not in self._copies:
            self._copies[version] = [tensor.detach().clone() for tensor in self._tensors]
        self._holders.setdefault(version, set()).add(holder)

    def drop(self, version: int, holder: int) -> None:
        """End the use of ``version`` by ``holder``. The last holder frees the copy."""
        holders = self._holders[version]
        holders.discard(holder)
        if not holders:
            del self._holders[version], self._copies[version]

    @contextmanager
    def weights(self, version: int) -> Iterator[None]:
        """Give the model the weights of ``version`` within the context; a negative version stands for those in use."""
        if version < 0:
            yield
            return
        current = [tensor.data for tensor in self._tensors]
        self._point(self._copies[version])
        try:
            yield
        finally:
            self._point(current)

    def _point(self, targets: list[Tensor]) -> None:
        for tensor, target in zip(self._tensors, targets, strict=True):
            tensor.data = target
