"""Weights that come are packed for the kernels while they are staged, beside the passes: a commit stays a change of
pointers (:mod:`headrace.models.kernels.panels`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import psutil
import torch
from torch import Tensor, nn

from headrace.base.buffers import zeros
from headrace.base.errors import WeightsError
from headrace.base.types.weights import WeightUpdate
from headrace.engine.native.swaps import WeightReceiver
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.kernels.panels import Packed, products_of
from headrace.models.weights import weight_tensors

SHARE = 0.25
"""Of the free memory: the most that two versions in panels may take. Without them engines compute the same, slower."""


class PackedWeightReceiver:
    """A :class:`~headrace.engine.native.swaps.WeightReceiver` of a model whose modules run on kernels."""

    def __init__(self, receiver: WeightReceiver, model: nn.Module) -> None:
        self._receiver = receiver
        products = [each for each in products_of(model) if not each.linear.weight.is_inference()]
        self._ops = kernels() if products else None
        sizes = [4 * self._ops.panel_numbers(each.linear.weight) for each in products if isinstance(self._ops, Kernels)]
        names = {id(tensor): name for name, tensor in weight_tensors(model).items()}
        self._products = [(names.get(id(each.linear.weight)), each) for each in products]
        """With what their weight is called where it comes anew; a frozen one has no name."""
        anew = [size if name else 0 for (name, _), size in zip(self._products, sizes, strict=True)]
        if sum(sizes) + sum(anew) > SHARE * psutil.virtual_memory().available:
            self._products, sizes, anew = [], [], []
        self._bytes, self._came = [sum(sizes), sum(anew)], 1
        self._memory = [[torch.from_numpy(zeros(size)).view(torch.float32) for size in each] for each in (sizes, anew)]
        self._used = 0
        self._prepared = False
        """Whether the other room holds what comes into use next."""
        self._staging, self._lock = False, threading.Lock()
        self._pack(self._used, [each.linear.weight.data for _, each in self._products], torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        """Of all panels: of one version until a second one comes."""
        return sum(self._bytes[: self._came])

    def stage(self, update: WeightUpdate) -> None:
        """And pack; in any thread. What is only half packed cannot be committed."""
        with self._lock:
            self._staging = True
        try:
            self._receiver.stage(update)
            staged, self._came, self._prepared = self._receiver.staged(), 2, False
            self._pack(1 - self._used, [staged.get(name) if name else None for name, _ in self._products], 1)
            self._prepared = True
        finally:
            self._staging = False

    def staged(self) -> Mapping[str, Tensor]:
        return self._receiver.staged()

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """With the last part the room that was in use is free."""
        with self._lock:
            if self._staging or (self._came == 2 and not self._prepared):
                words = "the next is still on its way" if self._staging else "nothing is staged"
                raise WeightsError(f"commit of version {version}, but {words}", remedy="stage it first")
            return self._turning(self._receiver.commit_parts(version, parts))

    def _turning(self, parts: Iterator[None]) -> Iterator[None]:
        yield from parts
        if self._prepared:
            self._used, self._prepared = 1 - self._used, False

    def _pack(self, room: int, weights: Sequence[Tensor | None], threads: int) -> None:
        """Those of the products, in their order; ``None`` leaves out."""
        chosen = [
            (product, Packed(weight, weight.data_ptr(), memory, product.linear.weight._version))
            for (_, product), weight, memory in zip(self._products, weights, self._memory[room], strict=True)
            if weight is not None
        ]
        if not isinstance(self._ops, Kernels) or not chosen:
            return
        for product, _ in chosen:
            product.rooms[room] = None
        self._ops.pack([(packed.weight, packed.panels) for _, packed in chosen], threads)
        for product, packed in chosen:
            product.rooms[room] = packed
