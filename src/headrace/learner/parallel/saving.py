"""Writing a snapshot of a sharded model: each rank writes what it holds, beside the training.

    all ranks, while training stands still     agree who writes which box ──▶ copy the own boxes to host memory
    a thread of each, while training goes on   write and flush the own shard ──▶ wait for those of all ranks
                                               ──▶ read a share of the weights from the shards, a file at a time, and
                                                   write it whole, as ordinary files of a model
    the first rank                             index, configuration, tokenizer, checksums

No tensor is gathered. A box that several ranks hold is written by the one with the fewest bytes to write. The first
part costs a rank host memory for its own boxes, which is free before it writes whole weights; those are read and
written in files of about :data:`FILE_BYTES`, which is what that costs.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import CheckpointError
from headrace.learner.disk import SLACK_BYTES, TOKENIZER_FILES, checksums_of, flush, flush_one, free_bytes, seal
from headrace.learner.parallel.mesh import Ranks
from headrace.learner.parallel.parts import Part, SavedParts, shard_name, slots, write_parts
from headrace.learner.parallel.shards import assigned, held
from headrace.models.load import INDEX_FILE
from headrace.models.weights import in_file_format

FILE_BYTES = 1 << 30
"""Size of a file of whole weights, in bytes; its last tensor may exceed it."""
WEIGHT = "model|"
"""The beginning of the labels of weights; the name in the model follows."""

Box = tuple[tuple[int, int], ...]
"""The first index of a box on each axis of its tensor, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a snapshot, of which this rank holds a part."""

    label: str
    """Name in the snapshot."""
    part: Tensor
    """This rank's part, wherever it lies."""
    like: Tensor
    """The tensor as which it is sharded."""

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.like.numel() * self.part.element_size()


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank about the files that it has written."""

    names: dict[str, str] = {}
    """The file of each weight that it wrote whole, by the weight's name there."""
    sums: dict[str, str] = {}
    """Checksums of its files: the rank that wrote a file hashes it."""
    problem: str = ""
    """Why it could not write; empty if it could."""


class ShardedSnapshot:
    """A snapshot of a sharded model whose tensors are copied, and whose files are not written yet."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, directory: Path, numbers: Mapping[str, int]) -> None:
        """Begin a snapshot of ``model`` in the existing ``directory``, with the ``numbers`` of the training step and of
        the updates. All ranks must do so together."""
        self._model = model
        self._ranks = ranks
        self._directory = directory
        self._numbers = dict(numbers)
        self._parts: list[Part] = []
        self._weights: list[tuple[str, int]] = []
        self._total_bytes = 0
        self._problem = ""

    def copy(self, tensors: Sequence[SourceTensor]) -> None:
        """Copy this rank's share of ``tensors`` to host memory, after agreeing with the other ranks who writes what.
        All ranks must call this together, with the same tensors in the same order."""
        boxes = [[box for box, _ in _places(one.like)] for one in tensors]
        said = self._ranks.gather(msgspec.json.encode(boxes))
        everybody = [msgspec.json.decode(each, type=list[list[Box]]) for each in said]
        mine = assigned(everybody, lambda index, box: _num_bytes(tensors[index], box))[self._ranks.rank]
        self._total_bytes = sum(one.num_bytes for one in tensors)
        self._weights = [
            (one.label.removeprefix(WEIGHT), one.num_bytes) for one in tensors if one.label.startswith(WEIGHT)
        ]
        try:
            for index, one in enumerate(tensors):
                self._parts += [_copied(one, box, where) for box, where in _places(one.like) if (index, box) in mine]
        except (RuntimeError, MemoryError) as error:  # no memory: the other ranks must hear of it
            self._parts = []
            self._problem = f"rank {self._ranks.rank}: its part cannot be copied to host memory: {error}"

    def add(self, label: str, values: Tensor) -> None:
        """Add a whole tensor in host memory, which only this rank writes."""
        self._parts.append(Part(label=label, at=(0,) * values.ndim, shape=tuple(values.shape), values=values))

    def write(self, model_dir: Path) -> None:
        """Write all files, flushed, with the tokenizer's files from ``model_dir``. All ranks must call this together,
        each in the thread beside its training, or in place of it.

        Raises :class:`~headrace.base.errors.CheckpointError` on every rank if one of them cannot; the directory is
        removed then.
        """
        said = self._told(self._write_shard())
        joined = self._told(self._write_weights()) if not _problems(said) else said
        sealed = _Written()
        if self._ranks.is_leader:
            sealed = self._seal([*said, *joined], model_dir)
        ended = self._told(sealed)
        if problems := _problems(said) or _problems(joined) or _problems(ended):
            raise CheckpointError(
                f"snapshot {self._directory} cannot be written: {'; '.join(problems)}",
                remedy=f"free space at {self._directory.parent} (df -h), keep fewer snapshots, or choose another run "
                "directory; the last whole snapshot is untouched",
            )

    def _told(self, mine: _Written) -> list[_Written]:
        """Return the reports of all ranks, in their order; ``mine`` is that of this rank."""
        said = self._ranks.gather_beside(msgspec.json.encode(mine))
        return [msgspec.json.decode(one, type=_Written) for one in said]

    def _write_shard(self) -> _Written:
        """Write and flush the parts that were copied, forget them, and return the report."""
        path = self._directory / shard_name(self._ranks.rank, self._ranks.config.world)
        try:
            if self._problem:
                raise OSError(self._problem)
            needed = self._total_bytes + sum(size for _, size in self._weights) + SLACK_BYTES
            if self._ranks.is_leader and free_bytes(self._directory) < needed:
                raise OSError(f"not enough space: {needed} bytes are needed in all")
            write_parts(path, self._parts, self._numbers)
            flush_one(path)
            return _Written(sums=checksums_of(self._directory, [path]))
        except (OSError, SafetensorError) as error:
            return _Written(problem=self._problem or f"rank {self._ranks.rank}: {error}")
        finally:
            self._parts = []

    def _write_weights(self) -> _Written:
        """Write this rank's share of the whole weights, which it reads from the shards of all ranks, and return the
        report."""
        world, names, written = self._ranks.config.world, dict[str, str](), list[Path]()
        files = weight_files([size for _, size in self._weights], world)
        try:
            saved = SavedParts([self._directory / shard_name(rank, world) for rank in range(world)]).under(WEIGHT)
            for number in range(self._ranks.rank, len(files), world):
                path = self._directory / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
                chosen = [self._weights[place][0] for place in files[number]]
                tensors = in_file_format(self._model, {name: saved[name].whole() for name in chosen})
                save_file(tensors, path, metadata={"format": "pt"})
                flush_one(path)
                names |= dict.fromkeys(tensors, path.name)
                written.append(path)
            return _Written(names=names, sums=checksums_of(self._directory, written))
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, MemoryError) as error:
            return _Written(problem=f"rank {self._ranks.rank}: {error}")

    def _seal(self, said: list[_Written], model_dir: Path) -> _Written:
        """Write the small files and the checksums and flush them, or remove the directory if a rank has reported a
        problem in ``said``; return the report. Only the first rank does so."""
        try:
            if not _problems(said):
                _write_small(self._directory, self._model, model_dir)
                _write_index(self._directory, {name: file for one in said for name, file in one.names.items()})
                seal(self._directory, {name: found for one in said for name, found in one.sums.items()})
                flush(self._directory)
                return _Written()
        except OSError as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            return _Written(problem=str(error))
        shutil.rmtree(self._directory, ignore_errors=True)
        return _Written()


def weight_files(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Return which tensors lie in which file of whole weights, by their places in ``sizes``, their sizes in bytes: in
    their order, in files of about equal size, at least one for each of ``world`` ranks.

    >>> weight_files([4, 4, 4, 4], world=2), weight_files([9, 1, 1], world=2)
    ([[0, 1], [2, 3]], [[0], [1, 2]])
    """
    total = max(1, sum(sizes))
    num_files = max(world, math.ceil(total / FILE_BYTES))
    files: dict[int, list[int]] = {}
    for place, before in enumerate(itertools.accumulate(sizes[:-1], initial=0)):
        files.setdefault(before * num_files // total, []).append(place)
    return list(files.values())


def _places(tensor: Tensor) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Yield each box of ``tensor`` that this rank holds, and where it lies in this rank's part."""
    axes = [list(zip(axis, slots(axis), strict=True)) for axis in held(tensor)]
    for chosen in itertools.product(*axes):
        box = tuple((run.start, run.stop) for run, _ in chosen)
        if all(begin < end for begin, end in box):
            yield box, tuple(slot for _, slot in chosen)


def _num_bytes(one: SourceTensor, box: Box) -> int:
    """Return the size of a box of a tensor in bytes."""
    return math.prod(end - begin for begin, end in box) * one.part.element_size()


def _copied(one: SourceTensor, box: Box, where: tuple[slice, ...]) -> Part:
    """Return a copy of one box of a tensor in host memory; ``where`` is its place in this rank's part."""
    values = one.part[where].to("cpu", copy=True, memory_format=torch.contiguous_format)
    return Part(label=one.label, at=tuple(begin for begin, _ in box), shape=tuple(one.like.shape), values=values)


def _problems(said: Sequence[_Written]) -> list[str]:
    """Return the problems that ranks have reported."""
    return [one.problem for one in said if one.problem]


def _write_small(directory: Path, model: PreTrainedModel, model_dir: Path) -> None:
    """Write the configuration of ``model`` into ``directory``, and copy the tokenizer's files from ``model_dir``."""
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    for pattern in TOKENIZER_FILES:
        for path in model_dir.glob(pattern):
            shutil.copyfile(path, directory / path.name)


def _write_index(directory: Path, files: Mapping[str, str]) -> None:
    """Write transformers' index into ``directory``: the file of each weight."""
    size = sum((directory / file).stat().st_size for file in set(files.values()))
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(files)}, indent=1)
    (directory / INDEX_FILE).write_text(index, encoding="utf-8")
