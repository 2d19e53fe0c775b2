"""Snapshots of a learner's model, its optimizer and its auxiliary models, which any number of ranks can read.

    one process      ``model.safetensors``, ``optimizer.safetensors``: whole tensors
    several ranks    ``shard-0000r-of-0000R.safetensors``: what rank r holds of everything (saving.py, parts.py);
                     ``model-*.safetensors``: the weights once more, whole, made of the shards beside the training
    an adapter       the first rank writes it, with its moments, as one process does: every rank has the whole of it

A snapshot is an ordinary model directory in each case. A rank that restores it reads only the parts that it holds, from
the shards, or from the whole tensors of one process and of older programs. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import CheckpointError, ModelError
from headrace.learner import snapshot
from headrace.learner.auxiliary.base import AuxiliaryModel
from headrace.learner.parallel.load import load_sharded
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.parts import STEP, UPDATES, SavedParts, SavedTensor, number_of_files, shards_of
from headrace.learner.parallel.saving import WEIGHT, ShardedSnapshot, SourceTensor
from headrace.learner.parallel.shards import local, part_of
from headrace.models.config import ModelConfig
from headrace.models.weights import fixed_buffers, is_adapted, weight_tensors

_OPTIMIZER = "optimizer|"
_RANDOM_STATE = "random_state.cpu"
_ENDING = ".safetensors"


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

    def begin(self, directory: Path, step: int, model_dir: Path) -> Callable[[], None]:
        """Begin a snapshot for the training step ``step`` in the existing ``directory``; the tokenizer's files come
        from ``model_dir``. Return the rest of the work, which each rank must call once: with several ranks and no
        adapter only a copy of the tensors has been made, and the rest may run in a thread while training goes on.
        Otherwise everything is written at once, and the rest is nothing.

        Both raise :class:`~headrace.base.errors.CheckpointError` on every rank if one of them cannot write; the
        directory is removed.
        """
        if isinstance(self._ranks, Ranks) and not is_adapted(self._model):
            self._ranks.open_beside()
            numbers = {STEP: step, UPDATES: self._optimizer.updates}
            begun = ShardedSnapshot(self._model, self._ranks, directory, numbers)
            begun.copy(list(self._sources()))
            if self._ranks.is_leader:
                begun.add(_RANDOM_STATE, torch.get_rng_state())
            return partial(begun.write, model_dir)
        self._save_as_one(directory, step, model_dir)
        return lambda: None

    def _sources(self) -> Iterator[SourceTensor]:
        """Yield everything that a snapshot of several ranks holds, in the same order on every rank."""
        for name, tensor in (weight_tensors(self._model) | fixed_buffers(self._model)).items():
            yield SourceTensor(label=f"{WEIGHT}{name}", part=local(tensor.detach()), like=tensor)
        for one in self._optimizer.trained:
            for key, part in self._optimizer.parts(one).items():
                yield SourceTensor(label=f"{_OPTIMIZER}{one.name}|{key}", part=part, like=one.weight)
        for model in self._auxiliary:
            for label, tensor in model.state() if model.has_state else ():
                yield SourceTensor(label=f"{model.name}|{label}", part=local(tensor.detach()), like=tensor)

    def _save_as_one(self, directory: Path, step: int, model_dir: Path) -> None:
        """Write everything into ``directory`` on the first rank, which has all of it, while the others wait. Raises
        :class:`~headrace.base.errors.CheckpointError` on every rank if it cannot."""
        failed: CheckpointError | None = None
        if self._ranks.is_leader:
            beside = {f"{one.name}{_ENDING}": _in_host(one.state()) for one in self._auxiliary if one.has_state}
            plain = self._optimizer.plain
            extras = snapshot.Extras(
                step=step,
                model_dir=model_dir,
                beside=beside,
                numbers={} if plain else {UPDATES: self._optimizer.updates},
            )
            try:
                snapshot.save(directory, self._model, self._moments(), extras)
            except CheckpointError as error:
                failed = error
        words = [failed.problem, failed.remedy] if failed else []
        if said := msgspec.json.decode(self._ranks.gather(msgspec.json.encode(words))[0], type=list[str]):
            raise CheckpointError(said[0], remedy=said[1]) from failed

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by ``weight|moment``; this rank has the whole of each."""
        if self._optimizer.plain:
            assert self._optimizer.adamw is not None  # an optimizer without Muon
            return snapshot.moments_of(self._model, self._optimizer.adamw)
        trained = self._optimizer.trained
        states = ((one.name, key, part) for one in trained for key, part in self._optimizer.parts(one).items())
        return {f"{name}|{key}": part.contiguous() for name, key, part in states}

    def restore_weights(self, directory: Path) -> None:
        """Copy the weights saved in ``directory`` into the model, in place, and from there into the optimizer's float32
        masters. From a snapshot of several ranks each rank reads its own part; from other directories, whose weights
        may have other names and forms, a second model is loaded.

        Raises :class:`~headrace.base.errors.CheckpointError` if they belong to another model.
        """
        if (shards := shards_of(directory)) and not is_adapted(self._model):
            self._restore_shards(directory, shards)
        elif isinstance(self._ranks, Ranks) and not is_adapted(self._model):
            self._restore_parts(directory, self._ranks)
        else:
            snapshot.restore_weights(directory, self._model)
        for one in self._optimizer.trained:
            one.refresh_master()

    @torch.no_grad()
    def _restore_shards(self, directory: Path, shards: list[Path]) -> None:
        """Read this rank's part of the weights from the ``shards`` of the snapshot ``directory``. Raises
        :class:`~headrace.base.errors.CheckpointError` if they belong to another model, or cannot be read."""
        with _usable(directory, "weights"):
            saved = SavedParts(shards).under(WEIGHT)
            held = weight_tensors(self._model) | fixed_buffers(self._model)
            if {name: tensor.shape for name, tensor in held.items()} != {
                name: one.shape for name, one in saved.items()
            }:
                raise _of_another(directory, self._model)
            for name, tensor in held.items():
                local(tensor.detach()).copy_(part_of(saved[name], tensor))

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
            raise _of_another(directory, self._model)
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
        with _usable(directory, "optimizer"):
            shards = shards_of(directory)
            files = shards or _all_files(directory, "optimizer")
            saved = SavedParts(files)
            step = int(saved.numbers[STEP])
            states: dict[str, dict[str, Tensor | SavedTensor]] = {}
            counted: list[int] = []
            for label, tensor in saved.under(_OPTIMIZER if shards else "").items():
                name, _, key = label.partition("|")
                if key == STEP:
                    counted.append(int(tensor.whole()))
                elif label != _RANDOM_STATE:
                    states.setdefault(name, {})[key] = tensor
            updates = int(saved.numbers.get(UPDATES, max(counted, default=step)))
            trained = {one.name: one for one in self._optimizer.trained}
            for name, state in states.items():
                self._optimizer.set_state(trained[name], state, updates)
            torch.set_rng_state(saved.under(_RANDOM_STATE)[""].whole())
            return step

    def restore_auxiliary(self, directory: Path) -> None:
        """Restore the saved states of the auxiliary models.

        Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged, or from other
        settings.
        """
        for model in self._auxiliary:
            if not model.has_state:
                continue
            try:
                shards = shards_of(directory)
                saved = SavedParts(shards or _all_files(directory, model.name))
                model.set_state(saved.under(f"{model.name}|" if shards else ""))
            except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"snapshot {directory} holds no {model.name} that these settings can use: {error}",
                    remedy=f"resume with the learner.{model.name} of the run that wrote it, or begin a run of its "
                    "own from those weights",
                ) from None


@contextmanager
def _usable(directory: Path, what: str) -> Iterator[None]:
    """Raise an error of the body that reads the snapshot ``directory`` as
    :class:`~headrace.base.errors.CheckpointError`; ``what`` names what is read."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the {what} of snapshot {directory} cannot be read, or is another model's: {error!r}",
            remedy="resume with the model that the snapshot was made from, from an older snapshot, or train again",
        ) from None


def _of_another(directory: Path, model: PreTrainedModel) -> CheckpointError:
    """Return the error for weights in ``directory`` that do not belong to ``model``."""
    return CheckpointError(
        f"the weights in {directory} are of another model than {type(model).__name__} as configured",
        remedy="resume with the model.path that the run was started with",
    )


def _all_files(directory: Path, kind: str) -> list[Path]:
    """Return the files of whole tensors of one ``kind``, which one process, or the ranks of an older program, have
    written. Raises ``OSError`` unless there are all of them."""
    files = sorted(directory.glob(f"{kind}*.safetensors"))
    if not files or len(files) != number_of_files(files[0]):
        raise OSError(f"of {kind}*.safetensors there are {len(files)} files, and not all")
    return files


def _in_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the named tensors in host memory, by name."""
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named}
