"""The transport of weights from the learner's model to the engine's model within one process: two slots on the engine's
device.

    learner's thread     copy(version)     ──▶ the slot that the engine does not read
    stager's thread      stage(update)         check that this is the last copy, and newer than the version in use
    engine's thread      commit_parts(...)     the engine's parameters point into it, between two steps

A *slot* is a set of tensors that contains one version of the weights. The weights do not leave the process, so they are
not hashed. A slot is read only after the copy into it has ended.
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
    """Both sides of the transport: the policy copies the learner's weights into a slot, and the engine uses this object
    as its weight receiver. The engine's tensors point to the memory of one of the two slots."""

    def __init__(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Create the two slots. ``source`` are the learner's tensors by name, and ``target`` the engine's. The first
        slot is the memory that the engine's tensors have now; the second slot is allocated here."""
        self._manifest = plan(source)
        """The names, shapes and number formats of all tensors, which an update contains."""
        self._source = list(source.values())
        self._names = list(source)
        """The names of the tensors, in the order of the source, the target and the slots."""
        self._target = [target[name] for name in source]
        first = [tensor.data for tensor in self._target]
        self._slots = (first, [torch.empty_like(tensor) for tensor in first])
        """The tensors of both slots."""
        self._used_slot = 0
        """The index of the slot that the engine uses."""
        self._lock = threading.Lock()
        """Held while the used slot and the versions are checked and changed together."""
        self._copied: int | None = None
        """The version in the slot that the engine does not use; ``None`` if it is committed, or while a copy is
        running."""
        self._switching_to: int | None = None
        """The version to which the engine's tensors are being switched; ``None`` if there is none."""
        self.committed = NOT_SAMPLED
        """The version that the engine uses."""

    def copy(self, version: int) -> WeightUpdate:
        """Copy the learner's tensors as ``version`` into the slot that the engine does not use, and return the update
        that the engine has to stage. The learner's tensors must not change meanwhile.

        Raises :class:`~headrace.base.errors.RunError` if the engine already uses this version or a newer one, and
        :class:`~headrace.base.errors.WeightsError` while an earlier version is still being committed.
        """
        with self._lock:
            if version <= self.committed:
                raise RunError(
                    f"version {version} is published already", remedy="call optim_step before the next publish"
                )
            if self._switching_to is not None:
                raise WeightsError(
                    f"version {self._switching_to} is still coming into use, and version {version} needs its slot",
                    remedy="wait for the publish before",
                )
            self._copied = None
            free = 1 - self._used_slot
        with torch.no_grad():
            torch._foreach_copy_(self._slots[free], [tensor.detach() for tensor in self._source])
        self._copied = version
        return WeightUpdate(version=version, slot=free, path="", manifest=self._manifest, checksums=())

    def stage(self, update: WeightUpdate) -> None:
        """Check that ``update`` is the latest copy; its weights are already in a slot. Raises
        :class:`~headrace.base.errors.WeightsError` if it is not."""
        if update.version != self._copied:
            raise WeightsError(f"version {update.version} is not the latest copy", remedy="publish again")

    def staged_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the latest copy, by name."""
        return dict(zip(self._names, self._slots[1 - self._used_slot], strict=True))

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Return an iterator that switches the engine's tensors to ``version`` in ``parts`` steps. Raises
        :class:`~headrace.base.errors.WeightsError` at once if the version is not staged."""
        with self._lock:
            if version != self._copied:
                raise WeightsError(f"version {version} is not staged", remedy="publish again")
            self._copied, self._switching_to = None, version
        return self._switch(version, -(-len(self._target) // parts))

    def _switch(self, version: int, at_once: int) -> Iterator[None]:
        """Make the engine's tensors point to the other slot, ``at_once`` tensors each time the iterator is advanced.
        After the last tensors, ``version`` is committed."""
        views = self._slots[1 - self._used_slot]
        for index, (tensor, view) in enumerate(zip(self._target, views, strict=True)):
            if index and index % at_once == 0:
                yield
            tensor.data = view
        with self._lock:
            self._used_slot, self._switching_to, self.committed = 1 - self._used_slot, None, version
