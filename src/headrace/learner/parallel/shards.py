"""Functions for tensors that are sharded over several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, which shares its memory. A tensor that is whole on every rank is its own
    part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return the distributed tensor of which ``part`` is this rank's part, sharded like ``tensor``; ``part`` itself if
    ``tensor`` is not sharded."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def placed(tensor: Tensor, other: Tensor) -> Tensor:
    """Return ``tensor`` sharded as ``other`` is, with the communication that this needs; both are on the same ranks."""
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor) or tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(placements=other.placements)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from the ranks that hold its parts, which must all call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(full: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's part of ``full``, a whole tensor that every rank has, cut as ``tensor`` is sharded; nothing is
    sent."""
    if not isinstance(tensor, DTensor):
        return full
    full = full.to(tensor.device_mesh.device_type)
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()


def copies(tensor: Tensor, world: int) -> int:
    """Return how many of the ``world`` ranks hold the same part of ``tensor``, by which sums over all ranks are
    divided."""
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    distinct = 1
    for axis, placement in enumerate(tensor.placements):
        distinct *= 1 if placement.is_replicate() else mesh.size(axis)
    return world // distinct


def wholes(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole, one at a time, with its name. All ranks must iterate together, to the end.

    With ``dtype``, floating-point numbers are rounded to it before they are sent.
    """
    for name, tensor in named:
        part = tensor.detach()
        if dtype is not None and part.is_floating_point():
            part = part.to(dtype)
        yield name, whole(part)
