"""Weights that every rank of a learner sends a part of: which rank sends what, and where it belongs in the image.

    tensor of the image     rank 0 holds rows 0-3, rank 1 rows 4-7: a piece of each
    piece                   a box of the tensor, contiguous in the memory of its sender
    bucket                  consecutive pieces, or some rows of a large one: what is sent in one message

A tensor that several ranks hold is sent by one of them. Sender and receivers derive the same buckets from the layouts,
so no message says where its bytes belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import xxhash
from torch import Tensor

from headrace.base.errors import ConfigError, WeightsError
from headrace.base.types.weights import BUCKET_BYTES, Manifest, RankLayout, TensorEntry
from headrace.sync.base import Form
from headrace.sync.manifest import plan, view


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A part of a tensor that is a range along each axis."""

    starts: tuple[int, ...]
    """The index of its first element along each axis."""
    shape: tuple[int, ...]
    """The number of its elements along each axis."""


ALONE_BYTES = 1 << 20
"""The size from which rows of a piece are a bucket of their own, so that an engine can receive them where they belong.
Smaller ones share a bucket, because each message takes time."""

Held = Mapping[str, Box]
"""The part of each tensor that one rank sends, by the tensor's name. Tensors that other ranks send are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """The rows of one piece that are sent in one bucket."""

    name: str
    """The name of the tensor in the image."""
    entry: TensorEntry
    """The rows as a tensor, with their place in the bucket."""
    starts: tuple[int, ...]
    """The index of their first element along each axis of the tensor in the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A range of the bytes that one rank sends, which is sent as one message."""

    start: int
    """The index of its first byte."""
    num_bytes: int
    """The number of its bytes."""
    blocks: tuple[_Block, ...]
    """What it consists of, in order."""

    @property
    def manifest(self) -> Manifest:
        """Return the layout of the bucket."""
        return Manifest(entries=tuple(block.entry for block in self.blocks), total_bytes=self.num_bytes)

    def views(self, payload: memoryview) -> list[Tensor]:
        """Return the blocks as views into the bytes of the bucket."""
        return [view(payload, block.entry) for block in self.blocks]


def whole(tensors: Mapping[str, Tensor]) -> Held:
    """Return the boxes of a rank that holds and sends all ``tensors`` whole.

    >>> whole({"w": torch.zeros(2, 3)})["w"]
    Box(starts=(0, 0), shape=(2, 3))
    """
    return {name: Box(starts=(0,) * tensor.ndim, shape=tuple(tensor.shape)) for name, tensor in tensors.items()}


def layout_of(held: Held, tensors: Mapping[str, Tensor], form: Form) -> RankLayout:
    """Return the layout of what a rank sends that sends ``held`` of ``tensors``, which are whole, in the form of a
    codec. Raises :class:`~headrace.base.errors.ConfigError` if the form cannot represent a box without its rest."""
    pieces: dict[str, Tensor] = {}
    starts: list[tuple[int, ...]] = []
    for name, box in held.items():
        tensor = tensors[name]
        parts = form.parts(name, torch.empty(box.shape, dtype=tensor.dtype, device="meta"))
        pieces |= parts
        starts += [_starts(name, box, tensor, part) for part in parts.values()]
    return RankLayout(pieces=plan(pieces), starts=tuple(starts))


def buckets(layout: RankLayout, largest: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the buckets in which a rank with ``layout`` sends its bytes: each of at most ``largest`` bytes, but of one
    row at least. Blocks of :data:`ALONE_BYTES` or more have one of their own."""
    groups: list[list[_Block]] = [[]]
    for block in _cut(layout, largest):
        entry, group = block.entry, groups[-1]
        joined_bytes = entry.offset_bytes + entry.num_bytes - group[0].entry.offset_bytes if group else 0
        alone = group and max(group[-1].entry.num_bytes, entry.num_bytes) >= ALONE_BYTES
        if alone or (group and joined_bytes > largest):
            groups.append([])
        groups[-1].append(block)
    return [_bucket(group) for group in groups if group]


def box_of(image: memoryview, whole_entry: TensorEntry, starts: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a box of the tensor at ``whole_entry`` as a view into ``image``: it begins at ``starts`` and has
    ``shape``."""
    return view(image, whole_entry)[
        tuple(slice(start, start + count) for start, count in zip(starts, shape, strict=True))
    ]


def checksums(image: memoryview, manifest: Manifest, layouts: Sequence[RankLayout]) -> Iterator[tuple[str, int]]:
    """Yield, rank after rank, the name of each piece in ``image`` and the xxh3 hash (64 bits) of its bytes as its rank
    has sent them. ``manifest`` is the layout of the image."""
    entries = {entry.name: entry for entry in manifest.entries}
    for layout in layouts:
        for piece, starts in zip(layout.pieces.entries, layout.starts, strict=True):
            box = box_of(image, entries[piece.name], starts, piece.shape)
            words = box.contiguous().reshape(-1).view(torch.uint8) if box.numel() else box.new_empty(0)
            yield piece.name, xxhash.xxh3_64_intdigest(words.numpy().data)


def refuse_incomplete(layouts: Sequence[RankLayout], manifest: Manifest) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` unless the pieces of all ranks are packed as they should be,
    and cover every element of every tensor in an image with the layout ``manifest`` exactly once."""
    boxes: dict[str, list[Box]] = {entry.name: [] for entry in manifest.entries}
    dtypes = {entry.name: entry.dtype for entry in manifest.entries}
    for rank, layout in enumerate(layouts):
        pieces = layout.pieces
        packed = {
            piece.name: torch.empty(piece.shape, dtype=_dtype(piece.dtype), device="meta") for piece in pieces.entries
        }
        if len(layout.starts) != len(pieces.entries) or plan(packed) != pieces:
            raise _wrong(f"rank {rank} announces pieces that do not lie one after the other")
        for piece, starts in zip(pieces.entries, layout.starts, strict=True):
            if dtypes.get(piece.name) != piece.dtype:
                raise _wrong(
                    f"rank {rank} announces {piece.dtype} for {piece.name}, which has {dtypes.get(piece.name)}"
                )
            boxes[piece.name].append(Box(starts=starts, shape=piece.shape))
    for entry in manifest.entries:
        _refuse_uncovered(entry, boxes[entry.name])


def _refuse_uncovered(entry: TensorEntry, boxes: list[Box]) -> None:
    """Raise :class:`~headrace.base.errors.WeightsError` unless ``boxes`` lie inside the tensor at ``entry`` and cover
    each of its elements exactly once: they have as many elements together as the tensor, and no two overlap."""
    for box in boxes:
        inside = len(box.starts) == len(box.shape) == len(entry.shape) and all(
            start >= 0 and count >= 0 and start + count <= size
            for start, count, size in zip(box.starts, box.shape, entry.shape, strict=True)
        )
        if not inside:
            raise _wrong(
                f"a piece of {entry.name}, {list(box.shape)} at {list(box.starts)}, is not in {list(entry.shape)}"
            )
    sent, wanted = sum(prod(box.shape) for box in boxes), prod(entry.shape)
    if sent != wanted or (len(boxes) > 1 and _overlap([box for box in boxes if prod(box.shape)])):
        raise _wrong(f"{len(boxes)} pieces with {sent} elements do not cover the {wanted} of {entry.name} once each")


def _overlap(boxes: list[Box]) -> bool:
    """Return whether two of the boxes, none of which is empty, have an element in common. They are sorted along the
    first axis, so that a box is compared only with those that begin before it ends there."""
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
    """Return where the ``part`` of a box begins in the same part of the whole ``tensor`` called ``name``. A part either
    has the shape of the box, or a row for each row of the box along the last axis. Raises
    :class:`~headrace.base.errors.ConfigError` if the box has only parts of such rows."""
    if tuple(part.shape) == box.shape:
        return box.starts
    if box.shape[1:] != tuple(tensor.shape[1:]):
        raise ConfigError(
            f"sync.codec='cast_fp8' has one scale for a whole row, and the learner's ranks hold parts of the rows of "
            f"{name}: {list(box.shape)} of {list(tensor.shape)}",
            remedy="set sync.codec = 'cast_bf16', or shard by rows (learner.parallel.data instead of tensor)",
        )
    return (box.starts[0] * prod(box.shape[1:-1]), 0)


def _cut(layout: RankLayout, largest: int) -> Iterator[_Block]:
    """Yield the pieces of ``layout``, large ones in blocks of rows along their first axis; the place of each block is
    that in all bytes of the rank. Pieces without elements are left out."""
    for piece, starts in zip(layout.pieces.entries, layout.starts, strict=True):
        rows = piece.shape[0] if piece.shape else 1
        if not piece.num_bytes:
            continue
        row_bytes = piece.num_bytes // rows
        step = max(1, largest // row_bytes)
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
    """Return the bucket of ``blocks``, which follow each other in the bytes of their rank."""
    start = blocks[0].entry.offset_bytes
    moved = tuple(_Block(name=block.name, entry=_moved(block.entry, -start), starts=block.starts) for block in blocks)
    last = moved[-1].entry
    return Bucket(start=start, num_bytes=last.offset_bytes + last.num_bytes, blocks=moved)


def _moved(entry: TensorEntry, by: int) -> TensorEntry:
    """Return ``entry`` with its place moved by ``by`` bytes."""
    return TensorEntry(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        offset_bytes=entry.offset_bytes + by,
        num_bytes=entry.num_bytes,
    )


def _dtype(name: str) -> torch.dtype:
    """Return the dtype of torch called ``name``. Raises :class:`~headrace.base.errors.WeightsError` if there is
    none."""
    found = torch.__dict__.get(name)
    if not isinstance(found, torch.dtype):
        raise _wrong(f"{name!r} is not a dtype")
    return found


def _wrong(problem: str) -> WeightsError:
    """Return the error for layouts that do not describe a whole version."""
    return WeightsError(
        f"what the learner's ranks announce is not a version of the weights: {problem}",
        remedy="use one version of headrace for engine and learner",
    )
