"""The packed layout of a set of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headrace.types.weights import Manifest, TensorEntry

ALIGNMENT_BYTES = 64
"""A cache line: every tensor begins on one."""


def plan(tensors: Mapping[str, Tensor]) -> Manifest:
    """Lay ``tensors`` out one after the other, aligned.

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
