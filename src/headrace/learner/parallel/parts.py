"""Files with parts of tensors, each written by one rank, from which any part of a tensor can be read.

    shard-00002-of-00004.safetensors        tensors: the boxes that the second of four ranks has written
        metadata  boxes: {key: [label, at, shape]}   a box's tensor, its first indices, the shape of the whole tensor
                  step, updates                      the numbers of the training step and of the updates

A *box* is the part of a tensor between two indices of every axis. The metadata of a file describe its contents, and its
name contains the number of files, so that a missing file is detected. Nothing is pickled. Files with whole tensors can
also be read: each of their tensors is one box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.models.load import SHARD

Ranges = Sequence[Sequence[range]]
"""For each axis of a tensor, the ranges of indices in a part of it, in their order in the part."""
STEP, UPDATES = "step", "updates"
"""The names of the two numbers in the metadata of a file: the training step, and the number of updates."""
_BOXES = "boxes"


class _PlaceOfBox(msgspec.Struct, frozen=True, array_like=True):
    """The description of a box in the metadata of a file."""

    label: str
    """The name of the tensor of which the box is a part."""
    at: tuple[int, ...]
    """The first index of the box on each axis."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One box of a named tensor, in host memory."""

    label: str
    """The name of the tensor."""
    at: tuple[int, ...]
    """The first index of the box on each axis."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    values: Tensor
    """The values of the box."""


def shard_name(rank: int, world: int) -> str:
    """Return the name of the file with the parts of the rank with the index ``rank``, of ``world`` ranks.

    >>> shard_name(1, 4)
    'shard-00002-of-00004.safetensors'
    """
    return f"{SHARD}{rank + 1:05d}-of-{world:05d}.safetensors"


def write_parts(path: Path, parts: Sequence[Part], numbers: Mapping[str, int]) -> None:
    """Write ``parts`` and, as metadata, ``numbers`` into the new file ``path``. Raises ``OSError`` or
    ``SafetensorError``."""
    keys = [f"{number}" for number in range(len(parts))]
    places = {key: _PlaceOfBox(one.label, one.at, one.shape) for key, one in zip(keys, parts, strict=True)}
    metadata = {_BOXES: msgspec.json.encode(places).decode(), **{name: str(one) for name, one in numbers.items()}}
    save_file({key: one.values for key, one in zip(keys, parts, strict=True)}, path, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredBox:
    """One box of a tensor in a file."""

    path: Path
    """The file."""
    file: Any
    """The open file: a reader of safetensors."""
    key: str
    """The name of the box in the file."""
    at: tuple[int, ...]
    """The first index of the box on each axis of the tensor."""
    size: tuple[int, ...]
    """The shape of the box."""

    def copy_into(self, target: Tensor, ranges: Sequence[range]) -> int:
        """Copy the values of this box whose indices are in the ranges ``ranges`` into ``target``, which covers these
        ranges. Return the number of copied values."""
        begins = [max(axis.start, at) for axis, at in zip(ranges, self.at, strict=True)]
        ends = [min(axis.stop, at + size) for axis, at, size in zip(ranges, self.at, self.size, strict=True)]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            return 0
        if not ranges:  # a scalar has no axes
            target.copy_(self.file.get_tensor(self.key))
            return 1
        here = tuple(slice(a - at, b - at) for a, b, at in zip(begins, ends, self.at, strict=True))
        there = tuple(slice(a - axis.start, b - axis.start) for a, b, axis in zip(begins, ends, ranges, strict=True))
        target[there].copy_(self.file.get_slice(self.key)[here])
        return math.prod(b - a for a, b in zip(begins, ends, strict=True))


class SavedTensor:
    """A tensor in files, whole or in parts. Only requested parts are read."""

    def __init__(self, label: str, shape: tuple[int, ...], boxes: list[_StoredBox]) -> None:
        """Describe the tensor ``label`` with the whole shape ``shape``, which is stored in ``boxes``."""
        self.label = label
        """The name of the tensor in the files."""
        self.shape = torch.Size(shape)
        """The shape of the whole tensor."""
        self._boxes = boxes

    def whole(self) -> Tensor:
        """Return the whole tensor. Raises the same errors as :meth:`read`."""
        return self.read([[range(length)] for length in self.shape])

    def read(self, ranges: Ranges) -> Tensor:
        """Return the part with the indices ``ranges``, in host memory. Raises ``ValueError`` if the files do not
        contain all of it, and ``SafetensorError`` for a damaged file."""
        part = torch.empty([sum(map(len, axis)) for axis in ranges], dtype=self._dtype())
        found = 0
        placed = [list(zip(axis, slots(axis), strict=True)) for axis in ranges]
        for chosen in itertools.product(*placed):
            wanted = [run for run, _ in chosen]
            target = part[tuple(slot for _, slot in chosen)] if chosen else part
            found += sum(box.copy_into(target, wanted) for box in self._boxes)
        if found != part.numel():
            files = ", ".join(sorted({box.path.name for box in self._boxes}))
            raise ValueError(f"{self.label}: {files} hold {found} of {part.numel()} numbers of a part of it")
        return part

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the tensor, which is the dtype of its first box."""
        first = self._boxes[0]
        some: Tensor = first.file.get_slice(first.key)[:0] if first.size else first.file.get_tensor(first.key)
        return some.dtype


def slots(axis: Sequence[range]) -> Iterator[slice]:
    """Yield for each range of an axis its slice in a part that contains all these ranges, one after the other."""
    at = 0
    for run in axis:
        yield slice(at, at + len(run))
        at += len(run)


class SavedParts:
    """The tensors in the files of one snapshot, by label. The files stay open as long as this object exists."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files ``paths`` and read their metadata. Raises ``OSError`` or ``SafetensorError`` with the file's
        name for a missing or damaged file, and ``ValueError`` for a file with inconsistent metadata."""
        self.numbers: dict[str, str] = {}
        """The metadata of the first file, such as the step, as text."""
        found: dict[str, tuple[tuple[int, ...], list[_StoredBox]]] = {}
        for path in paths:
            file = _open(path)
            metadata = file.metadata() or {}
            self.numbers = self.numbers or metadata
            for key, place, size in _boxes(path, file, metadata):
                shape, boxes = found.setdefault(place.label, (place.shape, []))
                if shape != place.shape:
                    raise ValueError(f"{path}: the shape of {place.label} is another than in other files")
                boxes.append(_StoredBox(path=path, file=file, key=key, at=place.at, size=size))
        self._tensors = {label: SavedTensor(label, shape, boxes) for label, (shape, boxes) in found.items()}

    def under(self, prefix: str) -> dict[str, SavedTensor]:
        """Return the tensors whose label begins with ``prefix``, by the label without the prefix."""
        return {label.removeprefix(prefix): one for label, one in self._tensors.items() if label.startswith(prefix)}


def find_shards(directory: Path) -> list[Path]:
    """Return the paths of the files with the parts of all ranks that have written the snapshot ``directory``, including
    missing files; empty if one process or an older version of Headrace has written it."""
    found = sorted(directory.glob(f"{SHARD}*.safetensors"))
    if not found:
        return []
    world = number_of_files(found[0])
    return [directory / shard_name(rank, world) for rank in range(world)]


def number_of_files(path: Path) -> int:
    """Return the number of files that were written together with ``path``, including it, by its name.

    >>> number_of_files(Path("shard-00001-of-00004.safetensors")), number_of_files(Path("optimizer.safetensors"))
    (4, 1)
    """
    _, _, count = path.stem.rpartition("-of-")
    return int(count) if count.isdigit() else 1


def _open(path: Path) -> Any:
    """Return ``path`` opened by safetensors. Raises ``OSError`` or ``SafetensorError`` with the path."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise SafetensorError(f"{path}: {error}") from None


def _boxes(path: Path, file: Any, metadata: Mapping[str, str]) -> Iterator[tuple[str, _PlaceOfBox, tuple[int, ...]]]:
    """Yield the key, the description and the shape of every box of the open file ``path``. Raises ``ValueError`` if its
    metadata do not match its tensors."""
    sizes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a mapping
    if _BOXES not in metadata:  # whole tensors
        yield from ((key, _PlaceOfBox(key, (0,) * len(size), size), size) for key, size in sizes.items())
        return
    try:
        places = msgspec.json.decode(metadata[_BOXES], type=dict[str, _PlaceOfBox])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: its metadata cannot be read: {error}") from None
    if places.keys() != sizes.keys():
        raise ValueError(f"{path}: its metadata describe other tensors than it holds")
    for key, place in places.items():
        if not len(place.at) == len(place.shape) == len(sizes[key]):
            raise ValueError(f"{path}: the metadata of {place.label} do not fit its part")
        yield key, place, sizes[key]
