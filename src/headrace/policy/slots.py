"""The transport of weights from the learner's model to the engine's within one process: two slots on the engine's
device.

    learner's thread     copy(version)     ──▶ the slot that the engine does not read
    stager's thread      stage(update)         check that this is the last copy, and newer than the version in use
    engine's thread      commit_parts(...)     the engine's parameters point into it, between two steps

A *slot* is one set of tensors that can hold a version of the weights. Nothing leaves the process, so nothing is hashed:
a slot is written by one copy and read only after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from headrace.base.errors import RunError, WeightsError
from headrace.base.types.versions import NOT_SAMPLED
from headrace.base.types.weights import WeightUpdate
from headrace.sync.manifest import plan


class Slots:
    """Both sides of the transport, which a policy owns. ``source`` are the learner's tensors by name and ``target`` the
    engine's, which it makes point to one slot or the other. The first slot is the memory that the engine's tensors had
    at the beginning. The engine uses it as its weight receiver."""

    def __init__(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Allocate the second slot, as large as the engine's tensors. The arguments are described at the class."""
        self._manifest = plan(source)
        self._source = list(source.values())
        self._names = list(source)
        self._target = [target[name] for name in source]
        first = [tensor.data for tensor in self._target]
        self._slots = (first, [torch.empty_like(tensor) for tensor in first])
        self._used = 0
        self._lock = threading.Lock()
        self._copied: int | None = None
        """The version in the free slot; ``None`` if it was committed, or is being written."""
        self._exchanging: int | None = None
        self.committed = NOT_SAMPLED
        """The version that the engine uses."""

    def copy(self, version: int) -> WeightUpdate:
        """Copy the learner's tensors as ``version`` into the slot that the engine does not use, and return the update
        with which the engine stages it. The tensors must not change meanwhile.

        Raises :class:`~headrace.base.errors.RunError` if the engine uses this version already, and
        :class:`~headrace.base.errors.WeightsError` while an earlier one is still being committed.
        """
        with self._lock:
            if version <= self.committed:
                raise RunError(
                    f"version {version} is published already", remedy="call optim_step before the next publish"
                )
            if self._exchanging is not None:
                raise WeightsError(
                    f"version {self._exchanging} is still coming into use, and version {version} needs its slot",
                    remedy="wait for the publish before",
                )
            self._copied = None
            free = 1 - self._used
        with torch.no_grad():
            torch._foreach_copy_(self._slots[free], [tensor.detach() for tensor in self._source])
        self._copied = version
        return WeightUpdate(version=version, slot=free, path="", manifest=self._manifest, checksums=())

    def stage(self, update: WeightUpdate) -> None:
        """Check ``update``, whose weights are in the free slot already. Raises
        :class:`~headrace.base.errors.WeightsError` if it is not the latest copy."""
        if update.version != self._copied:
            raise WeightsError(f"version {update.version} is not the latest copy", remedy="publish again")

    def staged(self) -> dict[str, Tensor]:
        """Return the tensors of the latest copy, by name."""
        return dict(zip(self._names, self._slots[1 - self._used], strict=True))

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Return an iterator that switches the engine to ``version`` in ``parts`` steps. Raises
        :class:`~headrace.base.errors.WeightsError` at once if the version is not staged."""
        with self._lock:
            if version != self._copied:
                raise WeightsError(f"version {version} is not staged", remedy="publish again")
            self._copied, self._exchanging = None, version
        return self._exchange(version, -(-len(self._target) // parts))

    def _exchange(self, version: int, at_once: int) -> Iterator[None]:
        """Point the engine's parameters to the tensors of the other slot, ``at_once`` of them each time the iterator is
        advanced; after the last ones, ``version`` is committed."""
        views = self._slots[1 - self._used]
        for place, (tensor, view) in enumerate(zip(self._target, views, strict=True)):
            if place and place % at_once == 0:
                yield
            tensor.data = view
        with self._lock:
            self._used, self._exchanging, self.committed = 1 - self._used, None, version
