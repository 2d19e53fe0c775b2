"""The sampling sessions: each has weights of its own, fixed or in-flight, and all share one engine.

The engine finds a session's weights by name in :class:`SamplerWeights`. A session of kind ``inflight`` takes the
weights of its model's next in-flight save between two steps; its tokens carry the version that sampled each.

Shape legend: T sampled tokens, K likeliest entries, R rows of a pass, D rows that sample.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.engine.native.adapters import PassRows
from headrace.models.multilora import GroupedRows, LoraStack, LoraTensors, MultiLora, Segment

Index = npt.NDArray[np.int64]
MOST_PADDING = 3
"""The most places of a grouped product for each token in it; beyond that each adapter's product is made by itself."""
KEPT_STACKS = 2
"""How many stacks of adapters are kept for the next passes."""


@dataclass(slots=True, kw_only=True, eq=False)
class SamplerSlot:
    """The weights of one sampling session."""

    place: int
    """Its number, which no other session gets: cached tokens are found under it."""
    lora: LoraTensors | None
    """``None`` for the base alone, and for weights that are on the disk now."""
    version: int
    """The version of the adapter: the number of its optimizer steps."""
    loaded: bool = True
    users: int = 0
    """The number of requests that sample with it."""


class SamplerWeights:
    """The weights of the sampling sessions, as an engine's adapters. Any thread may call; what changes is used from the
    next pass on. At most ``max_loaded`` adapters stay in memory while they are not used."""

    share_passes = True

    def __init__(self, multi: MultiLora, max_loaded: int) -> None:
        self._multi, self._max_loaded = multi, max_loaded
        self._slots: OrderedDict[str, SamplerSlot] = OrderedDict()
        self._by_place: dict[int, SamplerSlot] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._device = multi.device
        self._stacks: deque[tuple[list[LoraTensors], LoraStack]] = deque(maxlen=KEPT_STACKS)

    def put(self, name: str, lora: LoraTensors | None, version: int) -> None:
        """Set the weights of ``name``. A new name gets a number of its own; one that is there changes its weights."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                self._count += 1
                slot = self._slots[name] = SamplerSlot(place=self._count, lora=lora, version=version)
                self._by_place[slot.place] = slot
            else:
                slot.lora, slot.version, slot.loaded = lora, version, True
            self._unload()

    def use(self, name: str, load: Callable[[], tuple[LoraTensors | None, int]]) -> None:
        """Keep the weights of ``name`` in memory until :meth:`release`; ``load`` reads them if they are not there."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and slot.loaded:
                slot.users += 1
                self._slots.move_to_end(name)
                return
        self.put(name, *load())
        with self._lock:
            self._slots[name].users += 1

    def release(self, name: str) -> None:
        """End one use of ``name``."""
        with self._lock:
            self._slots[name].users -= 1
            self._unload()

    def lora(self, name: str) -> LoraTensors | None:
        """Return the weights of ``name``; ``None`` for the base."""
        slot = self._slots.get(name)
        return None if slot is None else slot.lora

    def drop(self, name: str) -> None:
        """Forget ``name``, if no request uses it."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None and not slot.users:
                del self._slots[name], self._by_place[slot.place]

    def names(self) -> Iterable[str]:
        return list(self._slots)

    def find(self, name: str) -> int | None:
        slot = self._slots.get(name)
        return 0 if not name else None if slot is None else slot.place

    def on(self, rows: PassRows) -> AbstractContextManager[None]:
        places = np.unique(rows.adapter_R).tolist()
        adapted = [place for place in places if self._of(place) is not None]
        if len(places) == 1:
            return self._multi.on([Segment(lora=self._of(places[0]))])
        of_tokens = np.repeat(rows.adapter_R, rows.counts_R)
        of_logits = rows.adapter_R[rows.completes_R]
        counts = [int((of_tokens == place).sum()) for place in adapted]
        if len(adapted) < 2 or max(counts) * len(adapted) > MOST_PADDING * sum(counts):
            return self._multi.on([self._segment(place, of_tokens, of_logits) for place in adapted])
        token_rows, logit_rows = (GroupedRows.of(each, adapted, self._device) for each in (of_tokens, of_logits))
        return self._multi.on_stack(self._stack_of(adapted), token_rows, logit_rows)

    def versions(self, adapter_D: Index, version: int) -> int | Index:
        known = {place: self._by_place[place].version for place in np.unique(adapter_D).tolist() if place}
        return np.array([known.get(place, version) for place in adapter_D.tolist()], np.int64)

    def _segment(self, place: int, of_tokens: Index, of_logits: Index) -> Segment:
        tokens, logits = (torch.from_numpy(np.flatnonzero(each == place)) for each in (of_tokens, of_logits))
        return Segment(lora=self._of(place), rows_N=tokens.to(self._device), rows_K=logits.to(self._device))

    def _stack_of(self, places: Sequence[int]) -> LoraStack:
        """Return the stack of the present weights of ``places``; the last ones are kept, since passes repeat."""
        loras = [lora for place in places if (lora := self._of(place)) is not None]
        for known, stack in self._stacks:
            if len(known) == len(loras) and all(map(is_, known, loras)):
                return stack
        stack = LoraStack.of(loras)
        self._stacks.append((loras, stack))
        return stack

    def _of(self, place: int) -> LoraTensors | None:
        return self._by_place[place].lora if place else None

    def _unload(self) -> None:
        """Free the weights that have not been used for longest, if there are too many; they can be loaded again."""
        held = [slot for slot in self._slots.values() if slot.lora is not None]
        for slot in [slot for slot in held if not slot.users][: max(0, len(held) - self._max_loaded)]:
            slot.lora, slot.loaded = None, False


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
