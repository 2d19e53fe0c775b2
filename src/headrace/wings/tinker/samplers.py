"""The weights of the sampling sessions of a base. Each session has its own weights, and all sessions share one engine.

The engine looks up a session's weights by the session's name in :class:`SamplerWeights`, which implements the engine's
interface for adapters. The weights of a ``snapshot`` session are fixed. The weights of an ``inflight`` session change,
between two engine steps, whenever its model saves in-flight weights; each token has the version that sampled it.

Shape legend: T sampled tokens, K likeliest entries, R rows of a pass (one for each request), D rows that sample.
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
    """The entry of one sampling session in :class:`SamplerWeights`."""

    adapter: int
    """The adapter number of new requests of the session, which is also part of the key of the engine's prefix cache. A
    new number, which no other session has, is assigned whenever the weights change. Requests that already run keep
    their number, but are sampled with the new weights."""
    weights: Weights | None
    """The tensors; ``None`` if the session samples from the base model, or if its weights have been unloaded and are
    only on the disk."""
    version: int
    """The version of the weights: the number of optimizer steps that made them."""
    loaded: bool = True
    """Whether the weights are in memory."""
    users: int = 0
    """The number of running requests that sample with these weights."""


GetWeights = Callable[[int], Weights | None]
"""A function that returns the weights with an adapter number; ``None`` stands for the base model's own weights."""


class Passes(Protocol):
    """The contract of a method to compute the rows of a forward pass, each with the weights of its session."""

    shared: bool
    """Whether rows of several sessions can be computed in one pass."""

    def on(self, rows: PassRows, get_weights: GetWeights) -> AbstractContextManager[None]:
        """Return a context in which the model computes a pass over ``rows``. ``get_weights`` returns the weights for
        the adapter number of each row."""
        ...


class WholePasses:
    """Passes in which the whole weights of one session replace the weights of the model."""

    shared = False

    def __init__(self, kind: WholeKind) -> None:
        """Use ``kind`` to replace the weights of the model."""
        self._kind = kind

    def on(self, rows: PassRows, get_weights: GetWeights) -> AbstractContextManager[None]:
        """Return a context in which the model computes with the weights of the session of ``rows``; all rows of such a
        pass belong to one session. ``get_weights`` returns the weights for the adapter number of each row."""
        weights = get_weights(int(rows.adapter_R[0]))
        assert not isinstance(weights, LoraTensors)
        return self._kind.on(weights)


class AdapterPasses:
    """Passes in which the base computes each row with the adapter of its session; rows of several sessions share a
    pass."""

    shared = True

    def __init__(self, multi: MultiLora) -> None:
        """Use ``multi`` to apply adapters to the rows of a pass."""
        self._multi = multi

    def on(self, rows: PassRows, get_weights: GetWeights) -> AbstractContextManager[None]:
        """Return a context in which the model computes each row with the adapter of its session; rows of the base model
        have no adapter. ``get_weights`` returns the weights for the adapter number of each row."""
        # number the distinct adapters of the pass; −1 marks rows of the base model
        adapters, of_R = np.unique(rows.adapter_R, return_inverse=True)
        loras, numbers = list[LoraTensors](), np.full(len(adapters), -1, np.int32)
        for index, adapter in enumerate(adapters.tolist()):
            lora = get_weights(adapter)
            if isinstance(lora, LoraTensors):
                numbers[index] = len(loras)
                loras.append(lora)
        adapter_R = numbers[of_R]
        of_tokens = np.repeat(adapter_R, rows.counts_R)
        return self._multi.on_rows(loras, AdapterRows(of_tokens, np.repeat(adapter_R, rows.num_logits_R)))


class SamplerWeights:
    """The weights of all sampling sessions of one base, which its engine uses as adapters. Any thread may call its
    methods; a change takes effect at the next forward pass. While more than ``max_loaded`` sessions have weights in
    memory, weights that no request uses are unloaded."""

    def __init__(self, passes: Passes, max_loaded: int) -> None:
        """Create an empty collection. ``passes`` is the method by which the engine's model computes with the
        weights."""
        self.share_passes = passes.shared
        self._passes, self._max_loaded = passes, max_loaded
        self._slots: OrderedDict[str, SamplerSlot] = OrderedDict()
        """The entry of each sampling session by name, the least recently used first."""
        self._by_adapter: dict[int, SamplerSlot] = {}
        """The entry with each adapter number that is in use."""
        self._lock = threading.Lock()
        """Held while the entries change, since any thread may change them."""
        self._last_adapter = 0
        """The adapter number that was assigned last."""

    def put(self, name: str, weights: Weights | None, version: int) -> None:
        """Set the weights of the session ``name`` and their version; they are used from the next pass on. ``None``
        stands for the base model's own weights."""
        with self._lock:
            self._set(name, weights, version)
            self._unload()

    def use(self, name: str, load: Callable[[], tuple[Weights | None, int]]) -> None:
        """Load the weights of the session ``name`` if needed, and keep them in memory until :meth:`release` has been
        called once for each call of this method. ``load`` reads the weights from the disk, and returns them with their
        version."""
        with self._lock:
            if self._count_use(name):
                return
        weights, version = load()
        with self._lock:
            if not self._count_use(name):  # else another thread has loaded or replaced the weights meanwhile
                self._set(name, weights, version)
                self._count_use(name)  # counted before the unloading, which then spares these weights
            self._unload()

    def release(self, name: str) -> None:
        """End one use of the weights of ``name``, which :meth:`use` began; weights without uses may be unloaded."""
        with self._lock:
            self._slots[name].users -= 1
            self._unload()

    def find_weights(self, name: str) -> Weights | None:
        """Return the weights of the session ``name``; ``None`` if it samples from the base model."""
        slot = self._slots.get(name)
        return None if slot is None else slot.weights

    def drop(self, name: str) -> None:
        """Remove the session ``name`` and free its weights, unless a request uses them."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and not slot.users:
                del self._slots[name]
                slot.weights, slot.loaded = None, False  # _by_adapter keeps it: an ending request may still have a row

    def names(self) -> Iterable[str]:
        """Return the names of the sessions that requests to the engine may use."""
        return list(self._slots)

    def find(self, name: str) -> int | None:
        """Return the adapter number for a new request of the session ``name``: 0 for the empty name, which is the base
        model, and ``None`` for an unknown session. The engine calls this."""
        slot = self._slots.get(name)
        return 0 if not name else None if slot is None else slot.adapter

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        """Return a context in which the engine's model computes a pass with the weights of each row's session."""
        return self._passes.on(rows, self._get_adapter_weights)

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        """Return the version of the weights that sampled the token of each row, ``[D]``, from the adapter numbers of
        the rows. ``version`` is the version of the base model, whose adapter number is 0."""
        known = {number: self._by_adapter[number].version for number in np.unique(adapter_D).tolist() if number}
        return np.array([known.get(number, version) for number in adapter_D.tolist()], np.int64)

    def _get_adapter_weights(self, adapter: int) -> Weights | None:
        """Return the weights with the adapter number ``adapter``; ``None`` for number 0, the base model."""
        return self._by_adapter[adapter].weights if adapter else None

    def _set(self, name: str, weights: Weights | None, version: int) -> None:
        """Set new weights for the session ``name``, and a new adapter number for its next requests. The caller must
        hold the lock."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = SamplerSlot(adapter=0, weights=weights, version=version)
        else:
            slot.weights, slot.version, slot.loaded = weights, version, True
        self._last_adapter += 1
        slot.adapter = self._last_adapter
        self._by_adapter[slot.adapter] = slot

    def _count_use(self, name: str) -> bool:
        """Count one more use of the weights of ``name`` if they are in memory; return whether they are."""
        slot = self._slots.get(name)
        if slot is None or not slot.loaded:
            return False
        slot.users += 1
        self._slots.move_to_end(name)
        return True

    def _unload(self) -> None:
        """Free the least recently used weights without uses while more than ``max_loaded`` weights are in memory; they
        can be read from the disk again. The caller must hold the lock."""
        held = [slot for slot in self._slots.values() if slot.weights is not None]
        for slot in [slot for slot in held if not slot.users][: max(0, len(held) - self._max_loaded)]:
            slot.weights, slot.loaded = None, False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session (sampler): one row of the journal's table ``samplers``."""

    id: str
    """The name of the sampling session: ``SESSION:sample:NUMBER``."""
    session: str
    """The id of the client session to which the sampler belongs."""
    base: str
    """The name of the base model, as the client gave it."""
    path: str | None
    """The path of the checkpoint whose weights sample; ``None`` for the base model and for weights without a name."""
    kind: str
    """``snapshot`` (fixed weights), ``inflight`` (the weights of the model's last in-flight save) or ``base``."""
    model: str | None
    """The id of the model whose weights sample, if they were saved for this sampler without a name; otherwise
    ``None``."""
    directory: str | None
    """The directory of its weights; ``None`` for the base model."""
    version: int
    """The number of optimizer steps that made its weights; 0 for the base model."""

    @classmethod
    def from_row(cls, row: Any) -> SamplerRecord:
        """Convert a row of the journal's table ``samplers``."""
        return cls(**dict(row))
