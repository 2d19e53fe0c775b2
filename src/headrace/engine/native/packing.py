"""A weight receiver that packs staged weights into the layout of the compiled kernels while passes continue, so that a
commit remains a change of pointers (:mod:`headrace.models.kernels.panels`).

A *product* is a linear module whose matrix product runs on such a kernel. There are two buffers of packed weights: one
for the version in use, one for the version that is staged.
"""

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
from headrace.models.kernels.panels import Packed, get_products
from headrace.models.weights import weight_tensors

MAX_MEMORY_SHARE = 0.25
"""The largest share of the free memory that two packed versions may take. Beyond it nothing is packed: results are the
same, but slower."""


class PackedWeightReceiver:
    """A :class:`~headrace.engine.native.swaps.WeightReceiver` for a model whose modules run on kernels: it stages an
    update with ``receiver``, and then packs the staged weights. If there are no such modules or there is not enough
    memory, it only forwards the calls to ``receiver``."""

    def __init__(self, receiver: WeightReceiver, model: nn.Module) -> None:
        """Stage updates with ``receiver``. Find the products of ``model`` that run on kernels, allocate the buffers of
        packed weights if there is enough memory, and pack the weights that the model has now."""
        self._receiver = receiver
        products = [each for each in get_products(model) if not each.linear.weight.is_inference()]
        dtype = products[0].linear.weight.dtype if products else torch.float32
        self._ops = kernels(dtype) if products else None
        """The kernels; ``None`` if the model has no products that run on them."""
        sizes = [
            dtype.itemsize * self._ops.panel_numbers(each.linear.weight)
            for each in products
            if isinstance(self._ops, Kernels)
        ]
        names = {id(tensor): name for name, tensor in weight_tensors(model).items()}
        self._products = [(names.get(id(each.linear.weight)), each) for each in products]
        """The products, each with the name of its weight among the tensors that a learner sends; a frozen weight has no
        name."""
        new_sizes = [size if name else 0 for (name, _), size in zip(self._products, sizes, strict=True)]
        if sum(sizes) + sum(new_sizes) > MAX_MEMORY_SHARE * psutil.virtual_memory().available:
            self._products, sizes, new_sizes = [], [], []
        self._bytes, self._num_versions = [sum(sizes), sum(new_sizes)], 1
        """The bytes of the first and of the second buffer, and the number of buffers that are in use."""
        self._memory = [[torch.from_numpy(zeros(size)).view(dtype) for size in each] for each in (sizes, new_sizes)]
        """The two buffers of packed weights, one tensor for each product. The second has no memory for frozen
        weights."""
        self._active = 0
        """The index of the buffer with which the model computes."""
        self._is_prepared = False
        """Whether the buffer that is not in use contains the next version, completely packed."""
        self._staging, self._lock = False, threading.Lock()
        """Whether a thread is staging an update, and the lock that guards this flag."""
        self._pack(self._active, [each.linear.weight.data for _, each in self._products], torch.get_num_threads())

    @property
    def num_bytes(self) -> int:
        """The memory of all packed weights in bytes: one version until the first :meth:`stage`, two versions
        afterwards."""
        return sum(self._bytes[: self._num_versions])

    def stage(self, update: WeightUpdate) -> None:
        """Stage ``update`` and pack its weights; may be called in any thread. An update that is only partly packed
        cannot be committed."""
        with self._lock:
            self._staging = True
        try:
            self._receiver.stage(update)
            staged, self._num_versions, self._is_prepared = self._receiver.staged_tensors(), 2, False
            self._pack(1 - self._active, [staged.get(name) if name else None for name, _ in self._products], 1)
            self._is_prepared = True
        finally:
            self._staging = False

    def staged_tensors(self) -> Mapping[str, Tensor]:
        """Return the staged tensors that are not in use yet, by the names of the model's parameters."""
        return self._receiver.staged_tensors()

    def commit_parts(self, version: int, parts: int) -> Iterator[None]:
        """Return an iterator that commits the staged version in ``parts`` steps, one part of the parameters for each
        ``next``. After the last part, the buffer that was in use is free for the next version. Raises
        :class:`~headrace.base.errors.WeightsError` if no version is completely staged."""
        with self._lock:
            if self._staging or (self._num_versions == 2 and not self._is_prepared):
                words = "the next is still on its way" if self._staging else "nothing is staged"
                raise WeightsError(f"commit of version {version}, but {words}", remedy="stage it first")
            return self._switch_buffers(self._receiver.commit_parts(version, parts))

    def _switch_buffers(self, parts: Iterator[None]) -> Iterator[None]:
        """Yield once for each of ``parts``; after the last part, put the buffer of the committed version into use."""
        yield from parts
        if self._is_prepared:
            self._active, self._is_prepared = 1 - self._active, False

    def _pack(self, buffer: int, weights: Sequence[Tensor | None], threads: int) -> None:
        """Pack ``weights``, one for each product in their order, into the buffer with index ``buffer``, with
        ``threads`` threads. A product whose weight is ``None`` is skipped."""
        chosen = [
            (product, Packed(weight, weight.data_ptr(), memory, product.linear.weight._version))
            for (_, product), weight, memory in zip(self._products, weights, self._memory[buffer], strict=True)
            if weight is not None
        ]
        if not isinstance(self._ops, Kernels) or not chosen:
            return
        for product, _ in chosen:
            product.rooms[buffer] = None
        self._ops.pack([(packed.weight, packed.panels) for _, packed in chosen], threads)
        for product, packed in chosen:
            product.rooms[buffer] = packed
