"""The bytes that a computation holds on a device, counted without computing it: its tensors are fake."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.models.attention import Plan, Rule


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that still exist. A kernel counts with its
    outputs, which is what it holds beyond the chip."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._add(each.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@contextmanager
def counted() -> Iterator[HeldBytes]:
    """Count inside the ``with`` block, in which tensors are fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), HeldBytes() as held:
        yield held


def layer_bytes(
    make: Callable[..., Plan], lengths: Sequence[int], rows_T: Sequence[int] | None = None, *,
    heads: tuple[int, int] = (64, 8), size: int = 64, window: int | None = None, softcap: float | None = None,
    sinks: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return what one layer of attention in bfloat16 keeps for its backward pass, and the most that it holds at a
    time, without its queries, keys and values. Heads and head size are gpt-oss's unless others are given."""
    count = sum(lengths) if rows_T is None else max(rows_T) + 1
    with counted() as held:
        plan = make(lengths, "cpu", rows_T)
        sinks_H = torch.empty(heads[0], dtype=torch.bfloat16, requires_grad=True) if sinks else None
        query, key, value = (
            torch.empty(count, each, size, dtype=torch.bfloat16, requires_grad=True)
            for each in (heads[0], *heads[1:] * 2)
        )
        given = held.now
        held.peak = given
        rule = Rule(layer=0, scale=0.125, window=window, softcap=softcap, sinks_H=sinks_H)
        out = plan.attend(query, key, value, rule)
        kept = held.now - given
        out.sum().backward()
        return kept, held.peak - given
