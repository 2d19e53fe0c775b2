"""Functions for tensors that are sharded over several ranks: the shard of a rank, the whole tensor, and the assignment
of equal boxes to ranks.

The *shard* of a tensor on a rank is the part of the tensor that the rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from headrace.learner.parallel.parts import SavedTensor

H = TypeVar("H", bound=Hashable)
"""The type by which the caller describes boxes of tensors."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, without a copy. A tensor that is not sharded is returned itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wrap_shard(shard: Tensor, tensor: Tensor) -> Tensor:
    """Return a distributed tensor that is sharded like ``tensor`` and of which ``shard`` is this rank's shard;
    ``shard`` itself if ``tensor`` is not sharded."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def reshard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` with the sharding of ``like``, redistributed among the ranks if necessary; both are on the
    same ranks."""
    if not isinstance(tensor, DTensor) or not isinstance(like, DTensor) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from the ranks that have its shards, which must all call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def slice_shard(full: Tensor | SavedTensor, tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``full`` with the sharding of ``tensor``, without communication. ``full`` is a whole
    tensor that every rank has, or a saved tensor, of which only this shard is read. Raises the errors that
    :meth:`SavedTensor.read` raises, and ``ValueError`` for a saved tensor of another shape."""
    if isinstance(full, SavedTensor):
        if full.shape != tensor.shape:
            raise ValueError(f"{full.label} is {list(full.shape)}, expected {list(tensor.shape)}")
        return full.read(local_ranges(tensor))
    if not isinstance(tensor, DTensor):
        return full
    full = full.to(tensor.device_mesh.device_type)
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()


def local_ranges(tensor: Tensor) -> list[list[range]]:
    """Return the indices of ``tensor`` in this rank's shard: for each axis a list of ranges, in the order of the shard.
    A tensor that is not sharded has one whole range for each axis."""
    if not isinstance(tensor, DTensor):
        return [[range(length)] for length in tensor.shape]
    found = [_runs(_indices(tensor, axis)) for axis in range(tensor.ndim)]
    size = tuple(sum(map(len, axis)) for axis in found)
    assert size == tensor.to_local().shape, f"a part of {size} is expected, {tuple(tensor.to_local().shape)} is held"
    return found


def _indices(tensor: DTensor, axis: int) -> list[int]:
    """Return the indices along ``axis`` of the whole tensor that are in this rank's shard."""
    mesh, length = tensor.device_mesh, tensor.shape[axis]
    numbers = torch.arange(length, device=mesh.device_type)
    others = [mesh.size()] * tensor.ndim  # as long as the mesh, so that every rank gets some indices of each axis
    others[axis] = length
    shaped = numbers.view([length if place == axis else 1 for place in range(tensor.ndim)]).expand(others)
    shard = distribute_tensor(shaped, mesh, tensor.placements, src_data_rank=None).to_local()
    along: Tensor = shard.movedim(axis, 0).flatten(1)[:, 0] if tensor.ndim > 1 else shard
    return along.tolist()


def _runs(indices: list[int]) -> list[range]:
    """Return ``indices`` as a list of ranges of consecutive numbers, in their order.

    >>> _runs([4, 5, 6, 0, 1])
    [range(4, 7), range(0, 2)]
    """
    groups = itertools.groupby(enumerate(indices), key=lambda each: each[1] - each[0])
    runs = [[index for _, index in group] for _, group in groups]
    return [range(run[0], run[-1] + 1) for run in runs]


def assign_to_ranks(
    boxes_by_rank: Sequence[Sequence[Sequence[H]]], size: Callable[[int, H], int]
) -> list[set[tuple[int, H]]]:
    """Assign each box to one of the ranks that have it, which sends or writes it, and return for each rank its pairs
    (index of the tensor, box). A box that several ranks have is assigned to the rank with the fewest bytes so far.
    Every rank computes the same result.

    ``boxes_by_rank`` are, for each rank and each tensor, the boxes that the rank has; ``size`` returns the bytes of a
    box of the tensor with a given index.

    >>> assign_to_ranks([[["a"], ["b"]], [["a"], ["b"]]], lambda tensor, box: 1)
    [{(0, 'a')}, {(1, 'b')}]
    """
    loads = [0] * len(boxes_by_rank)
    shares: list[set[tuple[int, H]]] = [set() for _ in boxes_by_rank]
    for tensor in range(len(boxes_by_rank[0])):
        holders: dict[H, list[int]] = {}
        for rank, of_rank in enumerate(boxes_by_rank):
            for box in of_rank[tensor]:
                holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            chosen = min(ranks, key=loads.__getitem__)
            loads[chosen] += size(tensor, box)
            shares[chosen].add((tensor, box))
    return shares


def num_replicas(tensor: Tensor, world: int) -> int:
    """Return how many of the ``world`` ranks have the same shard of ``tensor``. A sum over all ranks counts each shard
    so many times."""
    if not isinstance(tensor, DTensor):
        return world
    mesh = tensor.device_mesh
    distinct = 1
    for axis, placement in enumerate(tensor.placements):
        distinct *= 1 if placement.is_replicate() else mesh.size(axis)
    return world // distinct


def gather_each(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each name of ``named`` with its whole tensor, gathered one at a time. All ranks must iterate together, to
    the end.

    Floating-point tensors are rounded to ``dtype`` before they are gathered; ``None``: they are not rounded.
    """
    for name, tensor in named:
        part = tensor.detach()
        if dtype is not None and part.is_floating_point():
            part = part.to(dtype)
        yield name, gather_whole(part)
