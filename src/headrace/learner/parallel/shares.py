"""The parts of the weights that each rank of a learner sends to engines: nothing is gathered for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from headrace.base.errors import WeightsError
from headrace.learner.parallel.mesh import AnyRanks
from headrace.sync.pieces import Box


class _HeldPart(msgspec.Struct, frozen=True):
    """The part of a tensor that a rank holds: the arguments of its box."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]


def held_part(tensor: Tensor) -> Box:
    """Return which part of ``tensor`` this rank holds: all of it, if it is not sharded. Raises
    :class:`~headrace.base.errors.WeightsError` if what it holds does not have the shape that its sharding says."""
    if not isinstance(tensor, DTensor):
        return Box(starts=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    shape, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(tensor.to_local().shape) != tuple(shape):
        raise WeightsError(
            f"a rank holds {list(tensor.to_local().shape)} of a tensor {list(tensor.shape)}, and its sharding "
            f"{tensor.placements} says {list(shape)}",
            remedy="set another sync.transport, by which rank 0 gathers the weights",
        )
    return Box(starts=tuple(starts), shape=tuple(shape))


def shared_out(tensors: Mapping[str, Tensor], ranks: AnyRanks) -> list[dict[str, Box]]:
    """Return, for each rank, the part of each tensor that it sends. A part that several ranks hold is sent by the one
    that has the fewest bytes to send so far. Every rank gets the same result; all must call this at the same time."""
    parts = [held_part(tensor) for tensor in tensors.values()]
    message = msgspec.json.encode([_HeldPart(part.starts, part.shape) for part in parts])
    held = [msgspec.json.decode(each, type=list[_HeldPart]) for each in ranks.gather(message)]
    return share_out(tensors, [[Box(starts=part.starts, shape=part.shape) for part in each] for each in held])


def share_out(tensors: Mapping[str, Tensor], held: Sequence[Sequence[Box]]) -> list[dict[str, Box]]:
    """Return what :func:`shared_out` does, from the parts of ``tensors`` that each rank holds, in their order."""
    shares: list[dict[str, Box]] = [{} for _ in held]
    sizes = [0] * len(held)
    for index, (name, tensor) in enumerate(tensors.items()):
        for part in dict.fromkeys(parts[index] for parts in held):
            if not prod(part.shape) and tensor.numel():
                continue
            holders = [rank for rank, parts in enumerate(held) if parts[index] == part]
            sender = min(holders, key=lambda rank: sizes[rank])
            sizes[sender] += prod(part.shape) * tensor.element_size()
            shares[sender][name] = part
    return shares
