"""The packed layout of a set of tensors, and views into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from headrace.base.buffers import zeros
from headrace.base.types.weights import Manifest, TensorEntry

ALIGNMENT_BYTES = 64
"""The alignment of every tensor: a cache line."""


def plan(tensors: Mapping[str, Tensor]) -> Manifest:
    """Return a layout of ``tensors`` one after the other, aligned.

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
    """Return zeroed memory of this process, aligned to a page."""
    return memoryview(zeros(num_bytes))  # type: ignore[arg-type]  # arrays are buffers


def checksums(image: memoryview, manifest: Manifest) -> tuple[int, ...]:
    """Return the xxh3 hash of each tensor's bytes."""
    return tuple(
        xxhash.xxh3_64_intdigest(image[entry.offset_bytes : entry.offset_bytes + entry.num_bytes])
        for entry in manifest.entries
    )


def view(image: memoryview, entry: TensorEntry) -> Tensor:
    """Return the tensor as a view into ``image``, which it keeps alive."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    count = entry.num_bytes // dtype.itemsize
    return torch.frombuffer(image, dtype=dtype, count=count, offset=entry.offset_bytes).view(entry.shape)
