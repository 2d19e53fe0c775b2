"""The packed layout of a set of tensors, hashes of tensors, and views into an image. An *image* is a buffer with all
tensors of one version; its layout is a *manifest*, whose entries contain name, dtype, shape and offset of each
tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from headrace.base.buffers import zeros
from headrace.base.types.weights import Manifest, TensorEntry

ALIGNMENT_BYTES = 64
"""The alignment of every tensor in an image, in bytes: a cache line."""


def plan(tensors: Mapping[str, Tensor]) -> Manifest:
    """Return the layout of an image of ``tensors``, given by name. The tensors follow each other in this order, each
    aligned to :data:`ALIGNMENT_BYTES`.

    >>> import torch
    >>> [entry.offset_bytes for entry in plan({"a": torch.zeros(3), "b": torch.zeros(2, 2)}).entries]
    [0, 64]
    """
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset_bytes=offset,
                num_bytes=num_bytes,
            )
        )
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Manifest(entries=tuple(entries), total_bytes=offset)


def private_memory(num_bytes: int) -> memoryview:
    """Return ``num_bytes`` zeroed bytes of this process, aligned to a page."""
    return memoryview(zeros(num_bytes))  # type: ignore[arg-type]  # arrays are buffers


def checksums(image: memoryview, manifest: Manifest) -> tuple[int, ...]:
    """Return the xxh3 hash (64 bits) of each tensor's bytes in ``image``, in the order of the manifest."""
    return tuple(
        xxhash.xxh3_64_intdigest(image[entry.offset_bytes : entry.offset_bytes + entry.num_bytes])
        for entry in manifest.entries
    )


def view(image: memoryview, entry: TensorEntry) -> Tensor:
    """Return the tensor at ``entry`` as a view into ``image``, without a copy; the tensor keeps the memory alive."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.num_bytes // dtype.itemsize
    return torch.frombuffer(image, dtype=dtype, count=count, offset=entry.offset_bytes).view(entry.shape)
