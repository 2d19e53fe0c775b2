"""Snapshots of a sharded learner, with the same files as those of a single process, so that any number of ranks can
read them.

    every rank, together:  weight by weight, moment by moment:  gather it ──▶ one rank keeps it, in turn by size
    each rank, by itself:  write its share: model-0000r-of-0000R.safetensors, optimizer-0000r-of-0000R.safetensors

On disk every tensor is whole, under its usual name in the model's files; reading shards it again for any number of
ranks. Nothing is pickled. A rank needs host memory for its share of the snapshot.

Every rank has the whole of an adapter: the first rank writes it, with its moments, as one process does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import CheckpointError, ModelError
from headrace.learner import snapshot
from headrace.learner.auxiliary.base import AuxiliaryModel
from headrace.learner.disk import SLACK_BYTES, TOKENIZER_FILES, checksums_of, flush, free_bytes, seal
from headrace.learner.parallel.load import load_sharded
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.shards import local, whole
from headrace.models.config import ModelConfig
from headrace.models.weights import fixed_buffers, in_file_format, is_adapted, weight_tensors

_STEP, _UPDATES = "step", "updates"
_RANDOM_STATE = "random_state.cpu"


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank about the files that it has written."""

    names: list[str]
    """Names of the weights in its file."""
    sums: dict[str, str]
    """Checksums of its files: the rank that wrote a file hashes it."""
    problem: str
    """Why it could not write; empty if it could."""


class Snapshot:
    """The writer and reader of the snapshots of one model, its optimizer and its auxiliary models. Each rank has one,
    and all ranks call each method together."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: ShardOptimizer,
        ranks: AnyRanks,
        auxiliary: Sequence[AuxiliaryModel] = (),
    ) -> None:
        """Take the parts whose state is written and read; ``auxiliary`` are the learner's auxiliary models."""
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        self._auxiliary = auxiliary
        self._num_writers = 1 if is_adapted(model) else ranks.config.world

    def save(self, directory: Path, step: int, model_dir: Path) -> None:
        """Write everything into the existing ``directory``, flushed, for the training step ``step``; the tokenizer's
        files come from ``model_dir``.

        Raises :class:`~headrace.base.errors.CheckpointError` on every rank if one of them cannot; the directory is
        removed.
        """
        beside = self._beside()
        if self._optimizer.plain and self._num_writers == 1:
            self._save_as_one(directory, snapshot.Extras(step=step, model_dir=model_dir, beside=beside))
            return
        names: list[str] = []
        sums: dict[str, str] = {}
        problem = ""
        weights, moments = self._weights(), self._moments()
        try:
            everything = (weights, moments, *beside.values())
            needed = sum(tensor.numel() * tensor.element_size() for held in everything for tensor in held.values())
            if free_bytes(directory) < needed + SLACK_BYTES:
                raise OSError(f"not enough space: {needed} bytes are needed on this rank")
            names = list(weights)
            save_file(weights, directory / self._file("model"), metadata={"format": "pt"})
            numbers = {_STEP: str(step), _UPDATES: str(self._optimizer.updates)}
            save_file(moments, directory / self._file("optimizer"), metadata=numbers)
            for file, tensors in beside.items():
                save_file(tensors, directory / file)
            sums = checksums_of(directory, [directory / self._file(kind) for kind in ("model", "optimizer")])
            sums |= checksums_of(directory, [directory / file for file in beside])
            if self._ranks.is_leader:
                self._small_files(directory, model_dir)
        except (OSError, SafetensorError) as error:
            problem = f"rank {self._ranks.rank}: {error}"
        said = self._ranks.gather(msgspec.json.encode(_Written(names=names, sums=sums, problem=problem)))
        self._finish(directory, [msgspec.json.decode(one, type=_Written) for one in said])

    def _save_as_one(self, directory: Path, extras: snapshot.Extras) -> None:
        """Write everything into ``directory`` on the first rank, while the others wait. Raises
        :class:`~headrace.base.errors.CheckpointError` on every rank if it cannot."""
        failed: CheckpointError | None = None
        assert self._optimizer.adamw is not None  # an optimizer without Muon
        if self._ranks.is_leader:
            try:
                snapshot.save(directory, self._model, self._optimizer.adamw, extras)
            except CheckpointError as error:
                failed = error
        words = [failed.problem, failed.remedy] if failed else []
        if said := msgspec.json.decode(self._ranks.gather(msgspec.json.encode(words))[0], type=list[str]):
            raise CheckpointError(said[0], remedy=said[1]) from failed

    def restore_weights(self, directory: Path) -> None:
        """Copy the weights saved in ``directory`` into the model, in place, and from there into the optimizer's float32
        masters.

        Raises :class:`~headrace.base.errors.CheckpointError` if they belong to another model.
        """
        if isinstance(self._ranks, Ranks) and not is_adapted(self._model):
            self._restore_parts(directory, self._ranks)
        else:
            snapshot.restore_weights(directory, self._model)
        for one in self._optimizer.trained:
            one.refresh_master()

    @torch.no_grad()
    def _restore_parts(self, directory: Path, ranks: Ranks) -> None:
        """Load this rank's part of the weights in ``directory`` into the model. Raises
        :class:`~headrace.base.errors.CheckpointError` if they belong to another model."""
        dtype: Any = str(self._model.dtype).removeprefix("torch.")
        held = weight_tensors(self._model)
        try:
            saved = weight_tensors(load_sharded(ModelConfig(path=str(directory), dtype=dtype), ranks))
        except ModelError as error:
            raise CheckpointError(
                f"snapshot {directory} holds no usable weights: {error.problem}", remedy="resume from an older snapshot"
            ) from error
        if {name: tensor.shape for name, tensor in held.items()} != {name: t.shape for name, t in saved.items()}:
            raise CheckpointError(
                f"the weights in {directory} are of another model than {type(self._model).__name__} as configured",
                remedy="resume with the model.path that the run was started with",
            )
        for name, tensor in held.items():
            local(tensor.detach()).copy_(local(saved[name].detach()))

    def restore_optimizer(self, directory: Path) -> int:
        """Restore the optimizer's moments, the float32 masters and the random state, each rank its own shard, and
        return the number of the training step at which they were saved.

        Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged or belongs to another
        model.
        """
        if is_adapted(self._model):
            assert self._optimizer.adamw is not None  # refused at load
            return snapshot.restore_optimizer(directory, self._model, self._optimizer.adamw)
        files = sorted(directory.glob("optimizer*.safetensors"))
        try:
            if not files or len(files) != _written(files[0]):
                raise OSError(f"of optimizer*.safetensors there are {len(files)} files, and not all")
            steps = [self._restore_from(path) for path in files]
            return steps[0]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the optimizer of snapshot {directory} cannot be read, or is another model's: {error!r}",
                remedy="resume with the model that the snapshot was made from, from an older snapshot, or train again",
            ) from None

    def restore_auxiliary(self, directory: Path) -> None:
        """Restore the saved states of the auxiliary models.

        Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged, or from other
        settings.
        """
        for model in self._auxiliary:
            if not model.has_state:
                continue
            files = sorted(directory.glob(f"{model.name}*.safetensors"))
            try:
                if not files or len(files) != _written(files[0]):
                    raise OSError(f"of {model.name}*.safetensors there are {len(files)} files, and not all")
                model.set_state({name: tensor for path in files for name, tensor in load_file(path).items()})
            except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"snapshot {directory} holds no {model.name} that these settings can use: {error}",
                    remedy=f"resume with the learner.{model.name} of the run that wrote it, or begin a run of its "
                    "own from those weights",
                ) from None

    def _restore_from(self, path: Path) -> int:
        """Restore optimizer and random state from one of the optimizer's files, of which this rank keeps its shards,
        and return the number of the training step in it."""
        trained = {one.name: one for one in self._optimizer.trained}
        with safe_open(path, framework="pt") as file:
            step = int(file.metadata()[_STEP])
            labels = list(file.keys())
            counted = [int(file.get_tensor(label)) for label in labels if label.endswith(f"|{_STEP}")]
            updates = int(file.metadata().get(_UPDATES, max(counted, default=step)))
            for label in labels:
                name, _, key = label.partition("|")
                if label == _RANDOM_STATE:
                    torch.set_rng_state(file.get_tensor(label))
                elif key != _STEP:
                    self._optimizer.set_state(trained[name], {key: file.get_tensor(label)}, updates)
        return step

    def _file(self, kind: str) -> str:
        """Return the name of this rank's file of one ``kind``: ``model``, ``optimizer`` or the name of an auxiliary
        model."""
        if self._num_writers == 1:
            return f"{kind}.safetensors"
        return f"{kind}-{self._ranks.rank + 1:05d}-of-{self._num_writers:05d}.safetensors"

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights that this rank writes, as whole tensors under the names of the model's own files. All
        ranks must call it together."""
        held = weight_tensors(self._model) | fixed_buffers(self._model)
        return in_file_format(self._model, self._kept(iter(held.items())))

    def _beside(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the auxiliary models that this rank writes, by the name of their file. All ranks must
        call it together."""
        return {self._file(one.name): self._kept(iter(one.state())) for one in self._auxiliary if one.has_state}

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors that this rank writes, by ``weight|moment``; the first rank adds the random
        state."""
        states = (
            (f"{one.name}|{key}", tensor)
            for one in self._optimizer.trained
            for key, tensor in self._optimizer.state(one).items()
        )
        kept = self._kept(states)
        return kept | {_RANDOM_STATE: torch.get_rng_state()} if self._ranks.is_leader else kept

    def _kept(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return those of the named tensors that this rank writes, as whole tensors in host memory; each tensor goes to
        the rank with the fewest bytes so far. All ranks must iterate together, because sharded tensors are gathered."""
        loads = [0] * self._num_writers
        kept: dict[str, Tensor] = {}
        for name, tensor in tensors:
            writer = loads.index(min(loads))
            loads[writer] += tensor.numel() * tensor.element_size()
            full = whole(tensor.detach())
            if writer == self._ranks.rank:
                kept[name] = full.cpu().clone(memory_format=torch.contiguous_format)
        return kept

    def _small_files(self, directory: Path, model_dir: Path) -> None:
        """Write the model's configuration into ``directory``, and copy the tokenizer's files from ``model_dir``; only
        one rank does so."""
        self._model.config.save_pretrained(directory)
        if self._model.can_generate():
            self._model.generation_config.save_pretrained(directory)
        for pattern in TOKENIZER_FILES:
            for path in model_dir.glob(pattern):
                shutil.copyfile(path, directory / path.name)

    def _finish(self, directory: Path, said: list[_Written]) -> None:
        """Write the index and the checksums and flush, or remove the directory if a rank has reported a problem; every
        rank waits for the result. ``said`` are the reports of all ranks, in order of rank. Raises
        :class:`~headrace.base.errors.CheckpointError` on every rank if the snapshot could not be written."""
        problems = [one.problem for one in said if one.problem]
        if self._ranks.is_leader and not problems:
            try:
                if len(said) > 1:
                    _write_index(directory, [one.names for one in said])
                seal(directory, {name: found for one in said for name, found in one.sums.items()})
                flush(directory)
            except OSError as error:
                problems.append(str(error))
        if self._ranks.is_leader and problems:
            shutil.rmtree(directory, ignore_errors=True)
        if self._ranks.largest(len(problems)):
            raise CheckpointError(
                f"snapshot {directory} cannot be written: {'; '.join(problems) or 'the first rank failed'}",
                remedy=f"free space at {directory.parent} (df -h), keep fewer snapshots, or choose another run "
                "directory; the last whole snapshot is untouched",
            )


def _write_index(directory: Path, said: list[list[str]]) -> None:
    """Write transformers' index, which says which file contains which weight. ``said`` are the names of the weights
    that each rank wrote, in order of rank."""
    sizes = [path.stat().st_size for path in directory.glob("model-*.safetensors")]
    files = {
        name: f"model-{rank + 1:05d}-of-{len(said):05d}.safetensors"
        for rank, names in enumerate(said)
        for name in names
    }
    index = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": files}, indent=1)
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _written(path: Path) -> int:
    """Return how many files the ranks wrote of which ``path`` is one.

    >>> _written(Path("optimizer-00001-of-00004.safetensors")), _written(Path("optimizer.safetensors"))
    (4, 1)
    """
    _, _, count = path.stem.rpartition("-of-")
    return int(count) if count.isdigit() else 1
