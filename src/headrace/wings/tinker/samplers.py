"""The sampling sessions: each has weights of its own, fixed or in-flight, and all share one engine.

The engine finds a session's weights by name in :class:`SamplerWeights`. A session of kind ``inflight`` takes the
weights of its model's next in-flight save between two steps; its tokens carry the version that sampled each.

Shape legend: T sampled tokens, K likeliest entries, R rows of a pass, D rows that sample.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine.native.adapters import PassRows
from headrace.models.multilora import AdapterRows, LoraTensors, MultiLora
from headrace.wings.tinker.weights import Weights, WholeKind

Index = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class SamplerSlot:
    """The weights of one sampling session."""

    place: int
    """The adapter number that the engine gives to new requests of the session, and under which it caches their tokens.
    Each session gets a new one, used by no other, whenever its weights change. Requests that already run keep their
    number, but are sampled with the new weights."""
    weights: Weights | None
    """``None`` if the session samples from the base model, or if its weights have been unloaded to the disk."""
    version: int
    """The version of the weights: the number of optimizer steps that made them."""
    loaded: bool = True
    """Whether the weights are in memory."""
    users: int = 0
    """The number of running requests that sample with these weights."""


WeightsOf = Callable[[int], Weights | None]
"""Returns the weights with this number; ``None`` for the base."""


class Passes(Protocol):
    """How an engine's model computes the rows of a pass with the weights of their sessions."""

    shared: bool
    """Whether rows of several sessions can be computed in one pass."""

    def on(self, rows: PassRows, weights_of: WeightsOf) -> AbstractContextManager[None]:
        """Compute a pass over ``rows`` within this context."""
        ...


class WholePasses:
    """Passes with whole weights, of one session at a time."""

    shared = False

    def __init__(self, kind: WholeKind) -> None:
        self._kind = kind

    def on(self, rows: PassRows, weights_of: WeightsOf) -> AbstractContextManager[None]:
        weights = weights_of(int(rows.adapter_R[0]))
        assert not isinstance(weights, LoraTensors)
        return self._kind.on(weights)


class AdapterPasses:
    """Passes with adapters, of several sessions at a time."""

    shared = True

    def __init__(self, multi: MultiLora) -> None:
        self._multi = multi

    def on(self, rows: PassRows, weights_of: WeightsOf) -> AbstractContextManager[None]:
        """Give each row of the pass the adapter of its session, within this context; rows of the base model get
        none."""
        places, of_R = np.unique(rows.adapter_R, return_inverse=True)
        loras, numbers = list[LoraTensors](), np.full(len(places), -1, np.int32)
        for index, place in enumerate(places.tolist()):
            lora = weights_of(place)
            if isinstance(lora, LoraTensors):
                numbers[index] = len(loras)
                loras.append(lora)
        adapter_R = numbers[of_R]
        of_tokens = np.repeat(adapter_R, rows.counts_R)
        return self._multi.on_rows(loras, AdapterRows(of_tokens, adapter_R[rows.completes_R]))


class SamplerWeights:
    """The weights of the sampling sessions, as an engine's adapters. Any thread may call; what changes is used from the
    next pass on. At most ``max_loaded`` of them stay in memory while they are not used."""

    def __init__(self, passes: Passes, max_loaded: int) -> None:
        self.share_passes = passes.shared
        self._passes, self._max_loaded = passes, max_loaded
        self._slots: OrderedDict[str, SamplerSlot] = OrderedDict()
        self._by_place: dict[int, SamplerSlot] = {}
        self._lock = threading.Lock()
        self._count = 0

    def put(self, name: str, weights: Weights | None, version: int) -> None:
        """Set the weights of ``name``, which are used from the next pass on."""
        with self._lock:
            self._set(name, weights, version)
            self._unload()

    def use(self, name: str, load: Callable[[], tuple[Weights | None, int]]) -> None:
        """Keep the weights of ``name`` in memory until :meth:`release`; ``load`` reads them if they are not there."""
        with self._lock:
            if self._count_use(name):
                return
        weights, version = load()
        with self._lock:
            if not self._count_use(name):  # else it was loaded, or given newer weights, meanwhile
                self._set(name, weights, version)
                self._count_use(name)  # before others are unloaded, so that this one stays
            self._unload()

    def release(self, name: str) -> None:
        """End one use of ``name``."""
        with self._lock:
            self._slots[name].users -= 1
            self._unload()

    def weights_of(self, name: str) -> Weights | None:
        """Return the weights of ``name``; ``None`` for the base."""
        slot = self._slots.get(name)
        return None if slot is None else slot.weights

    def drop(self, name: str) -> None:
        """Forget ``name``, if no request uses it."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and not slot.users:
                del self._slots[name]
                slot.weights, slot.loaded = None, False  # its numbers stay: a request that ends may still have a row

    def names(self) -> Iterable[str]:
        return list(self._slots)

    def find(self, name: str) -> int | None:
        slot = self._slots.get(name)
        return 0 if not name else None if slot is None else slot.place

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        return self._passes.on(rows, self._of)

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        known = {place: self._by_place[place].version for place in np.unique(adapter_D).tolist() if place}
        return np.array([known.get(place, version) for place in adapter_D.tolist()], np.int64)

    def _of(self, place: int) -> Weights | None:
        return self._by_place[place].weights if place else None

    def _set(self, name: str, weights: Weights | None, version: int) -> None:
        """Give the session ``name`` new weights, and a new number, under which its next requests run."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = SamplerSlot(place=0, weights=weights, version=version)
        else:
            slot.weights, slot.version, slot.loaded = weights, version, True
        self._count += 1
        slot.place = self._count
        self._by_place[slot.place] = slot

    def _count_use(self, name: str) -> bool:
        """Count one more use of ``name``; return whether its weights are there."""
        slot = self._slots.get(name)
        if slot is None or not slot.loaded:
            return False
        slot.users += 1
        self._slots.move_to_end(name)
        return True

    def _unload(self) -> None:
        """Free the weights that have not been used for longest, if there are too many; they can be loaded again."""
        held = [slot for slot in self._slots.values() if slot.weights is not None]
        for slot in [slot for slot in held if not slot.users][: max(0, len(held) - self._max_loaded)]:
            slot.weights, slot.loaded = None, False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session, as the journal holds it."""

    id: str
    session: str
    base: str
    """The name of the base model, as the client gave it."""
    path: str | None
    """The checkpoint that it samples from; ``None`` for the base and for weights without a name."""
    kind: str
    """``snapshot``, ``inflight`` or ``base``."""
    model: str | None
    """The model that in-flight weights come from."""
    directory: str | None
    """Where its weights are; ``None`` for the base."""
    version: int

    @classmethod
    def of(cls, row: Any) -> SamplerRecord:
        """Return the record of a row of the journal."""
        return cls(**dict(row))
