"""The snapshots of a learner's model, its optimizer and its auxiliary models, which any number of ranks can restore.

    one process      ``model.safetensors``, ``optimizer.safetensors``: whole tensors
    several ranks    ``shard-0000r-of-0000R.safetensors``: the parts of all tensors on rank r (saving.py, parts.py);
                     ``model-*.safetensors``: the whole weights once more, written from the shards during training
    an adapter       rank 0 writes it with its moments, like one process, since every rank has the whole adapter

In each case a snapshot is an ordinary model directory. A rank restores only its own parts, from the shards, or from the
whole tensors that one process or an older version of Headrace has written. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from headrace.base.errors import CheckpointError
from headrace.learner import snapshot
from headrace.learner.auxiliary.base import AuxiliaryModel
from headrace.learner.parallel.load import load_sharded
from headrace.learner.parallel.mesh import AnyRanks, Ranks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.parts import STEP, UPDATES, SavedParts, SavedTensor, find_shards, number_of_files
from headrace.learner.parallel.saving import WEIGHT, ShardedSnapshot, SourceTensor
from headrace.learner.parallel.shards import local_shard, slice_shard
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
        """Use these parts of a learner, whose state is written and restored; ``auxiliary`` are its auxiliary models."""
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        self._auxiliary = auxiliary

    def begin(self, directory: Path, step: int, model_dir: Path) -> Callable[[], None]:
        """Start a snapshot after ``step`` training steps in the existing ``directory``; the tokenizer's files are
        copied from ``model_dir``. Return a function that completes it, which each rank must call once. With several
        ranks and no adapter, the tensors have only been copied, and the function may run in a thread while training
        continues. Otherwise everything has been written, and the function does nothing.

        Both raise :class:`~headrace.base.errors.CheckpointError` on every rank if one rank cannot write; the directory
        is then removed.
        """
        if isinstance(self._ranks, Ranks) and not is_adapted(self._model):
            self._ranks.open_beside()
            numbers = {STEP: step, UPDATES: self._optimizer.updates}
            sharded = ShardedSnapshot(self._model, self._ranks, directory, numbers)
            sharded.copy(list(self._sources()))
            if self._ranks.is_leader:
                sharded.add(_RANDOM_STATE, torch.get_rng_state())
            return partial(sharded.write, model_dir)
        self._save_as_one(directory, step, model_dir)
        return lambda: None

    def _sources(self) -> Iterator[SourceTensor]:
        """Yield all tensors of a snapshot of several ranks, in the same order on every rank."""
        for name, tensor in (weight_tensors(self._model) | fixed_buffers(self._model)).items():
            yield SourceTensor(label=f"{WEIGHT}{name}", part=local_shard(tensor.detach()), like=tensor)
        for one in self._optimizer.trained:
            for key, part in self._optimizer.parts(one).items():
                yield SourceTensor(label=f"{_OPTIMIZER}{one.name}|{key}", part=part, like=one.weight)
        for model in self._auxiliary:
            for label, tensor in model.state() if model.has_state else ():
                yield SourceTensor(label=f"{model.name}|{label}", part=local_shard(tensor.detach()), like=tensor)

    def _save_as_one(self, directory: Path, step: int, model_dir: Path) -> None:
        """Write all files into ``directory`` on rank 0, which has all tensors whole, while the other ranks wait. Raises
        :class:`~headrace.base.errors.CheckpointError` on every rank if rank 0 cannot write."""
        failed: CheckpointError | None = None
        if self._ranks.is_leader:
            auxiliary_files = {
                f"{one.name}{_ENDING}": _copy_to_host(one.state()) for one in self._auxiliary if one.has_state
            }
            plain = self._optimizer.plain
            extras = snapshot.Extras(
                step=step,
                model_dir=model_dir,
                auxiliary_files=auxiliary_files,
                numbers={} if plain else {UPDATES: self._optimizer.updates},
            )
            try:
                snapshot.save(directory, self._model, self._moments(), extras)
            except CheckpointError as error:
                failed = error
        words = [failed.problem, failed.remedy] if failed else []
        if problem := msgspec.json.decode(self._ranks.gather(msgspec.json.encode(words))[0], type=list[str]):
            raise CheckpointError(problem[0], remedy=problem[1]) from failed

    def _moments(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by ``weight|moment``; this rank has them whole."""
        if self._optimizer.plain:
            assert self._optimizer.adamw is not None  # an optimizer without Muon
            return snapshot.collect_moments(self._model, self._optimizer.adamw)
        trained = self._optimizer.trained
        states = ((one.name, key, part) for one in trained for key, part in self._optimizer.parts(one).items())
        return {f"{name}|{key}": part.contiguous() for name, key, part in states}

    def restore_weights(self, directory: Path) -> None:
        """Copy the weights in ``directory`` into the model, in place, and into the optimizer's float32 masters. From
        the shards of several ranks, each rank reads its own part. For other directories, whose weights may have other
        names and shapes, a second model is loaded.

        Raises :class:`~headrace.base.errors.CheckpointError` if they belong to another model.
        """
        if (shards := find_shards(directory)) and not is_adapted(self._model):
            self._restore_shards(directory, shards)
        elif isinstance(self._ranks, Ranks) and not is_adapted(self._model):
            snapshot.restore_weights(directory, self._model, partial(load_sharded, ranks=self._ranks))
        else:
            snapshot.restore_weights(directory, self._model)
        for one in self._optimizer.trained:
            one.refresh_master()

    @torch.no_grad()
    def _restore_shards(self, directory: Path, shards: list[Path]) -> None:
        """Read this rank's shard of the weights from ``shards``, the files of the snapshot ``directory``, into the
        model. Raises :class:`~headrace.base.errors.CheckpointError` if they belong to another model, or cannot be
        read."""
        with _reading(directory, "weights"):
            saved = SavedParts(shards).under(WEIGHT)
            model_tensors = weight_tensors(self._model) | fixed_buffers(self._model)
            if {name: tensor.shape for name, tensor in model_tensors.items()} != {
                name: one.shape for name, one in saved.items()
            }:
                raise snapshot.other_model_error(directory, self._model)
            for name, tensor in model_tensors.items():
                local_shard(tensor.detach()).copy_(slice_shard(saved[name], tensor))

    def restore_optimizer(self, directory: Path) -> int:
        """Restore this rank's shards of the optimizer's moments and of the float32 masters, and the random state.
        Return the number of training steps before the snapshot.

        Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged or belongs to another
        model.
        """
        if is_adapted(self._model):
            assert self._optimizer.adamw is not None  # settings with an adapter and without AdamW are refused
            return snapshot.restore_optimizer(directory, self._model, self._optimizer.adamw)
        with _reading(directory, "optimizer"):
            shards = find_shards(directory)
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
        """Restore the states of the auxiliary models from the snapshot ``directory``.

        Raises :class:`~headrace.base.errors.CheckpointError` for a file that is missing, damaged, or from other
        settings.
        """
        for model in self._auxiliary:
            if not model.has_state:
                continue
            try:
                shards = find_shards(directory)
                saved = SavedParts(shards or _all_files(directory, model.name))
                model.set_state(saved.under(f"{model.name}|" if shards else ""))
            except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(
                    f"snapshot {directory} holds no {model.name} that these settings can use: {error}",
                    remedy=f"resume with the learner.{model.name} of the run that wrote it, or begin a run of its "
                    "own from those weights",
                ) from None


@contextmanager
def _reading(directory: Path, contents: str) -> Iterator[None]:
    """Return a context in which an error while reading the snapshot ``directory`` becomes a
    :class:`~headrace.base.errors.CheckpointError`. ``contents`` names the contents that are read, for the error."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the {contents} of snapshot {directory} cannot be read, or is another model's: {error!r}",
            remedy="resume with the model that the snapshot was made from, from an older snapshot, or train again",
        ) from None


def _all_files(directory: Path, kind: str) -> list[Path]:
    """Return the files with whole tensors of one ``kind``, which one process or an older version of Headrace has
    written. Raises ``OSError`` if a file is missing."""
    files = sorted(directory.glob(f"{kind}*.safetensors"))
    if not files or len(files) != number_of_files(files[0]):
        raise OSError(f"of {kind}*.safetensors there are {len(files)} files, and not all")
    return files


def _copy_to_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of the tensors in host memory, by name."""
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in named}
