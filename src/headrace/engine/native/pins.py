"""Copies of older weights for pinned sequences: one copy per version, kept while a sequence needs it.

A sequence is *pinned* if its request requires one version of the weights for all its tokens, whichever versions are
committed meanwhile. A *holder* is the number of a pinned sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Pins:
    """The copies of older versions of the model's weights, at most ``max_versions`` of them.

    ``tensors`` are the model's parameters. In a pass under older weights, they point to the memory of a copy.
    """

    def __init__(self, tensors: Iterable[Tensor], max_versions: int) -> None:
        """Create the record without any copy. The arguments are described at the class."""
        self._max_versions = max_versions
        self._tensors = list(tensors)
        self._copies: dict[int, list[Tensor]] = {}
        """The copies of the parameters of each version, in the order of ``_tensors``."""
        self._holders: dict[int, set[int]] = {}
        """The holders of each copied version; a version without a holder has no copy."""

    @property
    def num_bytes(self) -> int:
        """The memory of all copies, in bytes."""
        each = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return each * len(self._copies)

    def may_hold(self, version: int) -> bool:
        """Return whether a sequence may be pinned to ``version`` now: the version has a copy already, or one more copy
        is allowed."""
        return version in self._copies or len(self._copies) < self._max_versions

    def move(self, device: torch.device) -> None:
        """Move the copies to ``device``: to the processor while the engine releases the memory of its GPU, and
        back."""
        for version, tensors in self._copies.items():
            self._copies[version] = [tensor.to(device) for tensor in tensors]

    def hold(self, version: int, holder: int) -> None:
        """Keep the weights of ``version`` for ``holder``. The first call for a version copies the model's present
        weights, so ``version`` must be in use at that time."""
        if version not in self._copies:
            self._copies[version] = [tensor.detach().clone() for tensor in self._tensors]
        self._holders.setdefault(version, set()).add(holder)

    def drop(self, version: int, holder: int) -> None:
        """End the use of ``version`` by ``holder``. The copy is freed when its last holder has dropped it."""
        holders = self._holders[version]
        holders.discard(holder)
        if not holders:
            del self._holders[version], self._copies[version]

    @contextmanager
    def weights(self, version: int) -> Iterator[None]:
        """Return a context in which the model has the weights of ``version``; for a negative version, the weights in
        use."""
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
        """Point the model's parameters to the memory of ``targets``, in the order of the parameters."""
        for tensor, target in zip(self._tensors, targets, strict=True):
            tensor.data = target
