"""Weights that come are packed for the kernels while they are staged, beside the passes: a commit stays a change of
pointers (:mod:`headrace.models.kernels.panels`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import psutil
import torch
from torch import Tensor, nn

from headrace.buffers import zeros
from headrace.engine.native.swaps import WeightReceiver
from headrace.models.kernels.ops import Kernels, kernels
from headrace.models.kernels.panels import Packed, products_of
from headrace.models.weights import weight_tensors
from headrace.types.weights import WeightUpdate

SHARE = 0.25
"""Of the free memory: the most that two versions in panels may take. Without them engines compute the same, slower."""


class Packing:
    """A :class:`~headrace.engine.native.swaps.WeightReceiver` of a model whose modules run on kernels."""

    def __init__(self, receiver: WeightReceiver, model: nn.Module) -> None:
        self._receiver = receiver
        products = products_of(model)
        self._ops = kernels() if products else None
        sizes = [4 * self._ops.panel_numbers(each.linear.weight) for each in products if isinstance(self._ops, Kernels)]
        if 2 * sum(sizes) > SHARE * psutil.virtual_memory().available:
            products, sizes = [], []
        self._version_bytes, self._num_versions = sum(sizes), 1
        names = {id(tensor): name for name, tensor in weight_tensors(model).items()}
        self._products = [(names.get(id(each.linear.weight)), each) for each in products]
        """With what their weight is called where it comes anew; a frozen one has no name."""
        self._memory = [[torch.from_numpy(zeros(size)).view(torch.float32) for size in sizes] for _ in (0, 1)]
        self._used = 0
        self._prepared = False
        """Whether the other room holds what comes into use next."""
        self._pack(self._used, [each.linear.weight.data for each in products], torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        """Of all panels: of one version until a second one comes."""
        return self._version_bytes * self._num_versions

    def stage(self, update: WeightUpdate) -> None:
        """And pack; in any thread."""
        self._receiver.stage(update)
        staged, self._num_versions = self._receiver.staged(), 2
        self._pack(1 - self._used, [staged.get(name) if name else None for name, _ in self._products], 1)
        self._prepared = True

    def staged(self) -> Mapping[str, Tensor]:
        return self._receiver.staged()

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """With the last part the room that was in use is free."""
        return self._turning(self._receiver.commit_parts(version, parts))

    def _turning(self, parts: Iterator[None]) -> Iterator[None]:
        yield from parts
        if self._prepared:
            self._used, self._prepared = 1 - self._used, False

    def _pack(self, room: int, weights: Sequence[Tensor | None], threads: int) -> None:
        """Those of the products, in their order; ``None`` leaves out."""
        chosen = [
            (product, Packed(weight, memory, product.linear.weight))
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
