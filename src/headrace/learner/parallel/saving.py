"""The writing of a snapshot of a sharded model: each rank writes its own parts while training continues.

    all ranks, while training stands still     assign boxes to ranks ──▶ copy the assigned boxes to host memory
    a thread of each, while training continues write and flush the rank's shard ──▶ wait for all ranks
                                               ──▶ read a share of the weights from the shards, a file at a time, and
                                                   write it whole, as ordinary files of a model
    rank 0                                     write index, configuration, tokenizer, checksums

A *box* is the part of a tensor between two indices of every axis. No tensor is gathered. A box that several ranks have
is written by the rank with the fewest bytes to write. The first phase needs host memory for the boxes of a rank, which
is freed before the rank writes whole weights. Whole weights are read and written in files of about :data:`FILE_BYTES`,
so they need that much memory.
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
from headrace.learner.disk import SLACK_BYTES, compute_checksums, copy_tokenizer, flush, flush_one, free_bytes, seal
from headrace.learner.parallel.mesh import Ranks
from headrace.learner.parallel.parts import Part, SavedParts, shard_name, slots, write_parts
from headrace.learner.parallel.shards import assign_to_ranks, local_ranges
from headrace.models.heads import copy_later, later_bytes
from headrace.models.load import INDEX_FILE
from headrace.models.weights import to_file_format

FILE_BYTES = 1 << 30
"""The size of a file of whole weights in bytes; the last tensor of a file may exceed it."""
_WRITE_ERRORS = (OSError, SafetensorError, ValueError, KeyError, RuntimeError, MemoryError)
"""The errors of reading, converting and writing weights that a rank reports to the other ranks."""
WEIGHT = "model|"
"""The prefix of the labels of weights; the name in the model follows."""

Box = tuple[tuple[int, int], ...]
"""For each axis of a tensor, the first index of a box and the index after its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a snapshot, of which this rank has a shard."""

    label: str
    """The name of the tensor in the snapshot."""
    part: Tensor
    """This rank's shard, on any device."""
    like: Tensor
    """A tensor with the same shape and the same sharding."""

    @property
    def num_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.like.numel() * self.part.element_size()


class _WriteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank about its written files."""

    names: dict[str, str] = {}
    """The file of each whole weight that the rank has written, by the weight's name in the file."""
    sums: dict[str, str] = {}
    """The checksums of the rank's files, by path; each rank hashes its own files."""
    problem: str = ""
    """The reason why the rank could not write; empty if it could."""


class ShardedSnapshot:
    """A snapshot of a sharded model during its creation: first the tensors are copied, then the files are written."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks, directory: Path, numbers: Mapping[str, int]) -> None:
        """Start a snapshot of ``model`` in the existing ``directory``. ``numbers`` are the number of training steps and
        the number of updates. All ranks must call this together."""
        self._model = model
        self._ranks = ranks
        self._directory = directory
        self._numbers = dict(numbers)
        """The numbers of training steps and of updates, which each file contains."""
        self._parts: list[Part] = []
        """The boxes that this rank writes, copied to host memory."""
        self._weights: list[tuple[str, int]] = []
        """The name and the size in bytes of each weight of the model, as a whole."""
        self._total_bytes = 0
        """The size in bytes of all tensors of the snapshot on all ranks."""
        self._problem = ""
        """The reason why this rank cannot write; empty if there is none."""

    def copy(self, tensors: Sequence[SourceTensor]) -> None:
        """Assign the boxes of ``tensors`` to ranks, and copy the boxes of this rank to host memory. All ranks must call
        this together, with the same tensors in the same order."""
        boxes = [[box for box, _ in _places(one.like)] for one in tensors]
        messages = self._ranks.gather(msgspec.json.encode(boxes))
        boxes_by_rank = [msgspec.json.decode(each, type=list[list[Box]]) for each in messages]
        mine = assign_to_ranks(boxes_by_rank, lambda index, box: _num_bytes(tensors[index], box))[self._ranks.rank]
        self._total_bytes = sum(one.num_bytes for one in tensors)
        self._weights = [
            (one.label.removeprefix(WEIGHT), one.num_bytes) for one in tensors if one.label.startswith(WEIGHT)
        ]
        try:
            for index, one in enumerate(tensors):
                self._parts += [_copy_box(one, box, where) for box, where in _places(one.like) if (index, box) in mine]
        except (RuntimeError, MemoryError) as error:  # out of memory: reported to the other ranks later
            self._parts = []
            self._problem = f"rank {self._ranks.rank}: its part cannot be copied to host memory: {error}"

    def add(self, label: str, values: Tensor) -> None:
        """Add the whole tensor ``values`` under ``label``, in host memory, which only this rank writes."""
        self._parts.append(Part(label=label, at=(0,) * values.ndim, shape=tuple(values.shape), values=values))

    def write(self, model_dir: Path) -> None:
        """Write and flush all files, with the tokenizer's files from ``model_dir``. All ranks must call this together;
        each may do so in a thread beside its training.

        Raises :class:`~headrace.base.errors.CheckpointError` on every rank if one rank cannot write; the directory is
        then removed.
        """
        shard_reports = self._gather_reports(self._write_shard(model_dir))
        weight_reports = self._gather_reports(self._write_weights()) if not _problems(shard_reports) else shard_reports
        seal_report = _WriteReport()
        if self._ranks.is_leader:
            seal_report = self._seal([*shard_reports, *weight_reports], model_dir)
        seal_reports = self._gather_reports(seal_report)
        if problems := _problems(shard_reports) or _problems(weight_reports) or _problems(seal_reports):
            raise CheckpointError(
                f"snapshot {self._directory} cannot be written: {'; '.join(problems)}",
                remedy=f"free space at {self._directory.parent} (df -h), keep fewer snapshots, or choose another run "
                "directory; the last whole snapshot is untouched",
            )

    def _gather_reports(self, report: _WriteReport) -> list[_WriteReport]:
        """Return the reports of all ranks, in their order; ``report`` is the report of this rank."""
        messages = self._ranks.gather_beside(msgspec.json.encode(report))
        return [msgspec.json.decode(one, type=_WriteReport) for one in messages]

    def _write_shard(self, model_dir: Path) -> _WriteReport:
        """Write and flush the copied parts, free their memory, and return the report. Rank 0 first compares the free
        space with what all files need, the prediction heads of ``model_dir`` included."""
        path = self._directory / shard_name(self._ranks.rank, self._ranks.config.world)
        try:
            if self._problem:
                raise OSError(self._problem)
            if self._ranks.is_leader:
                weights_bytes = sum(size for _, size in self._weights) + later_bytes(model_dir)
                needed = self._total_bytes + weights_bytes + SLACK_BYTES
                if free_bytes(self._directory) < needed:
                    raise OSError(f"not enough space: {needed} bytes are needed in all")
            write_parts(path, self._parts, self._numbers)
            flush_one(path)
            return _WriteReport(sums=compute_checksums(self._directory, [path]))
        except _WRITE_ERRORS as error:
            return _WriteReport(problem=self._problem or f"rank {self._ranks.rank}: {error}")
        finally:
            self._parts = []

    def _write_weights(self) -> _WriteReport:
        """Write this rank's share of the files of whole weights, which are read from the shards of all ranks, and
        return the report."""
        world, names, written = self._ranks.config.world, dict[str, str](), list[Path]()
        files = weight_files([size for _, size in self._weights], world)
        try:
            saved = SavedParts([self._directory / shard_name(rank, world) for rank in range(world)]).under(WEIGHT)
            for number in range(self._ranks.rank, len(files), world):
                path = self._directory / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
                chosen = [self._weights[place][0] for place in files[number]]
                tensors = to_file_format(self._model, {name: saved[name].whole() for name in chosen})
                save_file(tensors, path, metadata={"format": "pt"})
                flush_one(path)
                names |= dict.fromkeys(tensors, path.name)
                written.append(path)
            return _WriteReport(names=names, sums=compute_checksums(self._directory, written))
        except _WRITE_ERRORS as error:
            return _WriteReport(problem=f"rank {self._ranks.rank}: {error}")

    def _seal(self, reports: list[_WriteReport], model_dir: Path) -> _WriteReport:
        """Write and flush the small files, such as the tokenizer's from ``model_dir``, and the checksums on rank 0, or
        remove the directory if a rank has reported a problem in ``reports``. Return the report."""
        try:
            if not _problems(reports):
                _write_small(self._directory, self._model, model_dir)
                _write_index(self._directory, {name: file for one in reports for name, file in one.names.items()})
                copy_later(model_dir, self._directory)
                seal(self._directory, {name: found for one in reports for name, found in one.sums.items()})
                flush(self._directory)
                return _WriteReport()
        except _WRITE_ERRORS as error:  # the other ranks wait for this report
            shutil.rmtree(self._directory, ignore_errors=True)
            return _WriteReport(problem=str(error))
        shutil.rmtree(self._directory, ignore_errors=True)
        return _WriteReport()


def weight_files(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Return for each file of whole weights the indices of its tensors in ``sizes``, the sizes of all tensors in bytes.
    Tensors keep their order, and files have about equal sizes; there is at least one file for each of ``world`` ranks.

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
    """Yield each box of ``tensor`` that this rank has, and its slices in this rank's shard."""
    axes = [list(zip(axis, slots(axis), strict=True)) for axis in local_ranges(tensor)]
    for chosen in itertools.product(*axes):
        box = tuple((run.start, run.stop) for run, _ in chosen)
        if all(begin < end for begin, end in box):
            yield box, tuple(slot for _, slot in chosen)


def _num_bytes(source: SourceTensor, box: Box) -> int:
    """Return the size in bytes of ``box``, a box of the tensor ``source``."""
    return math.prod(end - begin for begin, end in box) * source.part.element_size()


def _copy_box(source: SourceTensor, box: Box, slices: tuple[slice, ...]) -> Part:
    """Return a copy of one box of the tensor ``source`` in host memory; ``slices`` are its slices in this rank's
    shard."""
    values = source.part[slices].to("cpu", copy=True, memory_format=torch.contiguous_format)
    return Part(label=source.label, at=tuple(begin for begin, _ in box), shape=tuple(source.like.shape), values=values)


def _problems(reports: Sequence[_WriteReport]) -> list[str]:
    """Return the problems in the reports of all ranks."""
    return [one.problem for one in reports if one.problem]


def _write_small(directory: Path, model: PreTrainedModel, model_dir: Path) -> None:
    """Write the configuration of ``model`` into ``directory``, and copy the tokenizer's files from ``model_dir``."""
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    copy_tokenizer(model_dir, directory)


def _write_index(directory: Path, files: Mapping[str, str]) -> None:
    """Write transformers' index into ``directory``, which maps each weight to its file (``files``)."""
    size = sum((directory / file).stat().st_size for file in set(files.values()))
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(files)}, indent=1)
    (directory / INDEX_FILE).write_text(index, encoding="utf-8")
