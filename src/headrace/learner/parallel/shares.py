"""The assignment of the parts of the weights to the ranks of a learner that send them to engines, without gathering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import msgspec
from torch import Tensor

from headrace.base.errors import ConfigError
from headrace.learner.parallel.mesh import AnyRanks
from headrace.learner.parallel.shards import assign_to_ranks, local_ranges
from headrace.sync.pieces import Box


def local_box(name: str, tensor: Tensor) -> Box:
    """Return the box of the ``tensor`` called ``name`` that this rank has: the whole tensor if it is not sharded.
    Raises :class:`~headrace.base.errors.ConfigError` if the rank has several ranges of an axis, which are not a box."""
    axes = local_ranges(tensor)
    for ranges in axes:
        if len(ranges) > 1:
            raise ConfigError(
                f"sync.transport='group' sends parts that are one range of each axis, and a rank of the learner holds "
                f"{len(ranges)} ranges of {name}",
                remedy="set sync.transport = 'http' or 'shm', by which rank 0 sends whole tensors",
            )
    runs = [ranges[0] if ranges else range(0) for ranges in axes]
    return Box(starts=tuple(run.start for run in runs), shape=tuple(map(len, runs)))


def assign_boxes(tensors: Mapping[str, Tensor], ranks: AnyRanks) -> list[dict[str, Box]]:
    """Return, for each rank, the boxes that it sends, by the names of the tensors. A box that several ranks have is
    sent by one of them. All ranks must call this together, and get the same result. Raises
    :class:`~headrace.base.errors.ConfigError` as :func:`local_box` does."""
    message = msgspec.json.encode([local_box(name, tensor) for name, tensor in tensors.items()])
    return assign_gathered_boxes(tensors, [msgspec.json.decode(each, type=list[Box]) for each in ranks.gather(message)])


def assign_gathered_boxes(
    tensors: Mapping[str, Tensor], boxes_by_rank: Sequence[Sequence[Box]]
) -> list[dict[str, Box]]:
    """Return the result of :func:`assign_boxes` from ``boxes_by_rank``, the boxes of ``tensors`` that each rank has."""
    names, sizes = list(tensors), [tensor.element_size() for tensor in tensors.values()]
    empty = [not tensor.numel() for tensor in tensors.values()]
    # an empty part is sent only if the whole tensor is empty
    boxes = [
        [[part] if prod(part.shape) or empty[index] else [] for index, part in enumerate(parts)]
        for parts in boxes_by_rank
    ]
    shares = assign_to_ranks(boxes, lambda index, part: prod(part.shape) * sizes[index])
    return [{names[index]: part for index, part in sorted(share, key=lambda each: each[0])} for share in shares]
