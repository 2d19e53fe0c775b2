"""Weights that some sequences stay under while others move on: a copy per version, kept while somebody needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Pins:
    """At most ``most`` copies. ``tensors`` are the model's: a pass under other weights points them elsewhere for its
    time."""

    def __init__(self, tensors: Iterable[Tensor], most: int) -> None:
        self._most = most
        self._tensors = list(tensors)
        self._copies: dict[int, list[Tensor]] = {}
        self._holders: dict[int, set[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all copies."""
        each = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return each * len(self._copies)

    def may_hold(self, version: int) -> bool:
        """Whether there is room for ``version``, or a copy already."""
        return version in self._copies or len(self._copies) < self._most

    def move(self, device: torch.device) -> None:
        """Keep the copies there."""
        for version, tensors in self._copies.items():
            self._copies[version] = [tensor.to(device) for tensor in tensors]

    def hold(self, version: int, holder: int) -> None:
        """``holder`` needs ``version``; its first holder must come while the model has these weights."""
        if version not in self._copies:
            self._copies[version] = [tensor.detach().clone() for tensor in self._tensors]
        self._holders.setdefault(version, set()).add(holder)

    def drop(self, version: int, holder: int) -> None:
        """``holder`` needs it no more; the last one frees the copy."""
        holders = self._holders[version]
        holders.discard(holder)
        if not holders:
            del self._holders[version], self._copies[version]

    @contextmanager
    def weights(self, version: int) -> Iterator[None]:
        """The model has the weights of ``version``; of a negative one, those that are in use."""
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
