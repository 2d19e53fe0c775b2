"""The division of the weights among the ranks of a learner that all send: the pieces of each rank, the buckets in which
it sends them, and their places in the engine's image.

    tensor of the image     for example, rank 0 holds rows 0-3 and rank 1 rows 4-7: one piece from each
    piece                   a box of the tensor, contiguous in the memory of its sender
    bucket                  consecutive pieces, or some rows of a large piece, which are sent in one message

A tensor that several ranks hold is sent by one of them. Sender and receivers compute the same buckets from the layouts,
so messages contain no positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from msgspec import structs
from torch import Tensor

from headrace.base.errors import ConfigError, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, Manifest, RankLayout, TensorEntry
from headrace.sync.base import Form
from headrace.sync.manifest import plan, view


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor that is a range along each axis."""

    starts: tuple[int, ...]
    """The index of the box's first element along each axis of the tensor."""
    shape: tuple[int, ...]
    """The number of the box's elements along each axis."""


ALONE_BYTES = 1 << 20
"""The size from which a block is a bucket of its own, so that an engine can receive it directly into the image. Smaller
blocks share a bucket, because each message takes time."""

TensorBoxes = Mapping[str, Box]
"""The parts of the tensors that one rank sends, by the tensor's name. Tensors that only other ranks send are
missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The rows of one piece that are sent in one bucket."""

    name: str
    """The name of the tensor in the image."""
    entry: TensorEntry
    """Dtype, shape and size of the block, and its offset in the bytes of the bucket (or, before buckets are formed, of
    the rank)."""
    starts: tuple[int, ...]
    """The index of the block's first element along each axis of the tensor in the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A range of the bytes of one rank that is sent as one message."""

    start: int
    """The index of the bucket's first byte in the bytes of the rank."""
    num_bytes: int
    """The number of bytes of the bucket."""
    blocks: tuple[_Block, ...]
    """The blocks of the bucket, in the order of their bytes."""

    @property
    def manifest(self) -> Manifest:
        """Return the layout of the bucket's bytes."""
        return Manifest(entries=tuple(block.entry for block in self.blocks), total_bytes=self.num_bytes)

    def views(self, payload: memoryview) -> list[Tensor]:
        """Return the blocks as views into ``payload``, the bytes of the bucket."""
        return [view(payload, block.entry) for block in self.blocks]


def whole_boxes(tensors: Mapping[str, Tensor]) -> TensorBoxes:
    """Return the boxes of a rank that holds and sends all ``tensors`` whole.

    >>> whole_boxes({"w": torch.zeros(2, 3)})["w"]
    Box(starts=(0, 0), shape=(2, 3))
    """
    return {name: Box(starts=(0,) * tensor.ndim, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}


def make_layout(boxes: TensorBoxes, tensors: Mapping[str, Tensor], form: Form) -> RankLayout:
    """Return the layout of the pieces of a rank that sends the ``boxes`` of ``tensors`` (the whole tensors, by
    name), represented by ``form``. Raises :class:`~headrace.base.errors.ConfigError` if the form cannot represent a box
    separately."""
    pieces: dict[str, Tensor] = {}
    starts: list[tuple[int, ...]] = []
    for name, box in boxes.items():
        tensor = tensors[name]
        parts = form.parts(name, torch.empty(box.shape, dtype=tensor.dtype, device="meta"))
        pieces |= parts
        starts += [_starts(name, box, tensor, part) for part in parts.values()]
    return RankLayout(pieces=plan(pieces), starts=tuple(starts))


def buckets(layout: RankLayout, max_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the buckets in which a rank with ``layout`` sends its bytes. A bucket has at most ``max_bytes`` bytes, but
    at least one row. A block of :data:`ALONE_BYTES` or more is a bucket of its own."""
    groups: list[list[_Block]] = [[]]
    for block in _blocks(layout, max_bytes):
        entry, group = block.entry, groups[-1]
        joined_bytes = entry.offset_bytes + entry.num_bytes - group[0].entry.offset_bytes if group else 0
        alone = group and max(group[-1].entry.num_bytes, entry.num_bytes) >= ALONE_BYTES
        if alone or (group and joined_bytes > max_bytes):
            groups.append([])
        groups[-1].append(block)
    return [_bucket(group) for group in groups if group]


def view_box(image: memoryview, whole_entry: TensorEntry, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a view into ``image`` of the box of the tensor ``whole_entry`` that begins at the indices ``starts`` and
    has the shape ``shape``."""
    return view(image, whole_entry)[
        tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))
    ]


def checksums(image: memoryview, manifest: Manifest, layouts: Sequence[RankLayout]) -> Iterator[tuple[str, int]]:
    """Yield, rank after rank, the name of each piece and the xxh3 hash (64 bits) of its bytes in ``image``, in the
    order in which its rank has sent them. ``manifest`` is the layout of the image."""
    entries = {entry.name: entry for entry in manifest.entries}
    for layout in layouts:
        for piece, starts in zip(layout.pieces.entries, layout.starts, strict=True):
            box = view_box(image, entries[piece.name], starts, piece.shape)
            words = box.contiguous().reshape(-1).view(torch.uint8) if box.numel() else box.new_empty(0)
            yield piece.name, xxhash.xxh3_64_intdigest(words.numpy().data)


def refuse_incomplete(layouts: Sequence[RankLayout], manifest: Manifest) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` unless the pieces of each rank are packed as by
    :func:`~headrace.sync.manifest.plan`, and the pieces of all ranks together cover every element of every tensor in an
    image with the layout ``manifest`` exactly once."""
    boxes: dict[str, list[Box]] = {entry.name: [] for entry in manifest.entries}
    dtypes = {entry.name: entry.dtype for entry in manifest.entries}
    for rank, layout in enumerate(layouts):
        pieces = layout.pieces
        packed = {
            piece.name: torch.empty(piece.shape, dtype=_dtype(piece.dtype), device="meta") for piece in pieces.entries
        }
        if len(layout.starts) != len(pieces.entries) or plan(packed) != pieces:
            raise _layout_error(f"rank {rank} announces pieces that do not lie one after the other")
        for piece, starts in zip(pieces.entries, layout.starts, strict=True):
            if dtypes.get(piece.name) != piece.dtype:
                raise _layout_error(
                    f"rank {rank} announces {piece.dtype} for {piece.name}, which has {dtypes.get(piece.name)}"
                )
            boxes[piece.name].append(Box(starts=starts, shape=piece.shape))
    for entry in manifest.entries:
        _refuse_uncovered(entry, boxes[entry.name])


def _refuse_uncovered(entry: TensorEntry, boxes: list[Box]) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` unless ``boxes`` are inside the tensor ``entry`` and cover each
    of its elements exactly once: together they have as many elements as the tensor, and no two of them overlap."""
    for box in boxes:
        inside = len(box.starts) == len(box.shape) == len(entry.shape) and all(
            start >= 0 and count >= 0 and start + count <= size
            for start, count, size in zip(box.starts, box.shape, entry.shape, strict=True)
        )
        if not inside:
            raise _layout_error(
                f"a piece of {entry.name}, {list(box.shape)} at {list(box.starts)}, is not in {list(entry.shape)}"
            )
    sent, wanted = sum(prod(box.shape) for box in boxes), prod(entry.shape)
    if sent != wanted or (len(boxes) > 1 and _overlap([box for box in boxes if prod(box.shape)])):
        raise _layout_error(
            f"{len(boxes)} pieces with {sent} elements do not cover the {wanted} of {entry.name} once each"
        )


def _overlap(boxes: list[Box]) -> bool:
    """Return whether two of ``boxes``, none of which is empty, have an element in common. The boxes are sorted along
    the first axis, so that each box is compared only with later boxes that begin before its end."""
    boxes = sorted(boxes, key=lambda box: box.starts)
    for index, box in enumerate(boxes):
        end = box.starts[0] + box.shape[0] if box.starts else 1
        for other in boxes[index + 1 :]:
            if other.starts and other.starts[0] >= end:
                break
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(box.starts, box.shape, other.starts, other.shape, strict=True)
            ):
                return True
    return False


def _starts(name: str, box: Box, tensor: Tensor, part: Tensor) -> tuple[int, ...]:
    """Return the index, along each axis, at which the ``part`` of a box begins in the same part of the whole ``tensor``
    called ``name``. A part either has the shape of the box, or (scales) one row for each row of the box along the last
    axis. Raises :class:`~headrace.base.errors.ConfigError` for scales if the box does not contain whole rows."""
    if tuple(part.shape) == box.shape:
        return box.starts
    if box.shape[1:] != tuple(tensor.shape[1:]):
        raise ConfigError(
            f"sync.codec='cast_fp8' has one scale for a whole row, and the learner's ranks hold parts of the rows of "
            f"{name}: {list(box.shape)} of {list(tensor.shape)}",
            remedy="set sync.codec = 'cast_bf16', or shard by rows (learner.parallel.data instead of tensor)",
        )
    return (box.starts[0] * prod(box.shape[1:-1]), 0)


def _blocks(layout: RankLayout, max_bytes: int) -> Iterator[_Block]:
    """Yield the pieces of ``layout`` as blocks. A piece larger than ``max_bytes`` bytes is divided into blocks of rows
    along its first axis. The offset of a block counts all bytes of the rank. Pieces without elements are skipped."""
    for piece, starts in zip(layout.pieces.entries, layout.starts, strict=True):
        rows = piece.shape[0] if piece.shape else 1
        if not piece.num_bytes:
            continue
        row_bytes = piece.num_bytes // rows
        step = max(1, max_bytes // row_bytes)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            entry = TensorEntry(
                name=piece.name,
                dtype=piece.dtype,
                shape=(count, *piece.shape[1:]) if piece.shape else (),
                offset_bytes=piece.offset_bytes + first * row_bytes,
                num_bytes=count * row_bytes,
            )
            yield _Block(name=piece.name, entry=entry, starts=(starts[0] + first, *starts[1:]) if starts else ())


def _bucket(blocks: list[_Block]) -> Bucket:
    """Return the bucket that consists of ``blocks``, which follow each other in the bytes of their rank."""
    start = blocks[0].entry.offset_bytes
    shifted = tuple(
        replace(block, entry=structs.replace(block.entry, offset_bytes=block.entry.offset_bytes - start))
        for block in blocks
    )
    last = shifted[-1].entry
    return Bucket(start=start, num_bytes=last.offset_bytes + last.num_bytes, blocks=shifted)


def _dtype(name: str) -> torch.dtype:
    """Return the dtype of torch called ``name``. Raises :class:`~headrace.base.errors.WeightsError` for an unknown
    name."""
    found = torch.__dict__.get(name)
    if not isinstance(found, torch.dtype):
        raise _layout_error(f"{name!r} is not a dtype")
    return found


def _layout_error(problem: str) -> WeightsError:
    """Return the error for layouts that do not describe a whole version."""
    return WeightsError(
        f"what the learner's ranks announce is not a version of the weights: {problem}",
        remedy="use one version of headrace for engine and learner",
    )
