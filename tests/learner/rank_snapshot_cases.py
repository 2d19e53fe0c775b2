"""What ranks do with their snapshots; each case returns what the tests look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import CheckpointError, ModelError
from headrace.learner.parallel import files, parts, saving
from headrace.learner.parallel.shards import gather_whole
from headrace.models.heads import copy_later
from headrace.models.weights import weight_tensors
from tests.learner.builders import random_batch
from tests.learner.rank_cases import Found, Messages, _curve, _learner, _save
from tests.learner.sharded import ShardedLearner

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "memory": {"offload_optimizer": True}}
"""Weights whose float32 masters and moments lie in host memory."""


def state(learner: ShardedLearner) -> dict[str, torch.Tensor]:
    """Every weight, moment and master, gathered whole."""
    found = {name: gather_whole(tensor.detach()).clone() for name, tensor in weight_tensors(learner.model).items()}
    for one in learner.optimizer.trained:
        for key, tensor in learner.optimizer.state(one).items():
            found[f"{one.name}|{key}"] = gather_whole(tensor).clone()
    return found


def _begin(learner: ShardedLearner, directory: Path) -> Callable[[], None]:
    if learner.ranks.is_leader:
        directory.mkdir()
    learner.ranks.wait()
    return learner.core.begin_save(directory)


def _saved(directory: Path, parallel: dict[str, int], name: str, **more: Any) -> Found:
    """Two steps, a snapshot, and five further steps, of which two are made before the files are written."""
    learner = _learner(directory, parallel, **more)
    _curve(learner, range(2))
    expected = state(learner)
    messages = Messages()
    with messages:
        rest = _begin(learner, directory / name)
    writing = threading.Thread(target=rest)
    losses = _curve(learner, range(2, 4))
    writing.start()
    losses += _curve(learner, range(4, 7))
    writing.join()
    if learner.ranks.is_leader:
        save_file(expected, directory / f"{name}.expected")
    learner.ranks.wait()
    return {"curve": losses, "messages": messages.counts}


def _restored(directory: Path, parallel: dict[str, int], name: str, **more: Any) -> Found:
    """The snapshot ``name``, read into a learner of other weights without a second model; then five steps."""
    learner = _learner(directory, parallel, **more)
    _forbid_second_model()
    learner.core.restore(directory / name)
    found, expected = state(learner), load_file(directory / f"{name}.expected")
    wrong = [key for key in expected if key not in found or not same_bits(found[key], expected[key])]
    return {"wrong": wrong, "more": sorted(found.keys() - expected.keys()), "curve": _curve(learner, range(2, 7))}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _forbid_second_model() -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("a second model was loaded")

    files.load_sharded = forbidden


def shards_by_two(directory: Path) -> Found:
    return _saved(directory, {"data": 2}, "shards_by_two", **BFLOAT16)


def shards_on_two(directory: Path) -> Found:
    return _restored(directory, {"tensor": 2}, "shards_by_two", **BFLOAT16)


def shards_read(directory: Path) -> Found:
    """How many bytes of the shards a rank reads that is cut as those that wrote them; then five steps."""
    read: list[int] = []
    plain = parts.SavedTensor.read

    def counted(self: parts.SavedTensor, ranges: parts.Ranges) -> torch.Tensor:
        part = plain(self, ranges)
        read.append(part.nbytes)
        return part

    learner = _learner(directory, {"data": 2}, **BFLOAT16)
    parts.SavedTensor.read = counted  # type: ignore[method-assign]
    learner.core.restore(directory / "shards_by_two")
    parts.SavedTensor.read = plain  # type: ignore[method-assign]
    all_bytes = sum(tensor.nbytes for tensor in load_file(directory / "shards_by_two.expected").values())
    random_bytes = torch.get_rng_state().nbytes
    return {"read": sum(read), "part": all_bytes / 2 + random_bytes, "curve": _curve(learner, range(2, 7))}


def shards_from_one(directory: Path) -> Found:
    """The optimizer of one process, which has whole tensors."""
    learner = _learner(directory, {"data": 2})
    learner.core.restore(directory / "whole_by_one")
    found, expected = state(learner), load_file(directory / "whole_by_one.expected")
    return {
        "wrong": [key for key in expected if not same_bits(found[key], expected[key])],
        "step": learner.core.version,
    }


def shards_full_disk(directory: Path) -> Found:
    """One rank cannot write: all raise, with its number, and nothing is left."""
    learner = _learner(directory, {"data": 2})
    rest = _begin(learner, directory / "full")
    if not learner.ranks.is_leader:
        (directory / "full" / "shard-00002-of-00002.safetensors").mkdir()
    try:
        rest()
    except CheckpointError as error:
        learner.ranks.wait()
        return {"problem": error.problem, "left": (directory / "full").exists()}
    return {"problem": "", "left": True}


def shards_bad_heads(directory: Path) -> Found:
    """The first rank cannot copy the prediction heads: all raise, and none waits for it."""
    learner = _learner(directory, {"data": 2})
    rest = _begin(learner, directory / "headless")

    def refuse(_base: Path, _directory: Path) -> None:
        raise ModelError("the checkpoint has no config.json", remedy="copy it again")

    saving.copy_later = refuse
    try:
        rest()
    except CheckpointError as error:
        return {"problem": error.problem, "left": (directory / "headless").exists()}
    finally:
        saving.copy_later = copy_later
    return {"problem": "", "left": True}


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp2_tp2": ({"data": 2, "tensor": 2}, {}),
    "hsdp2x2": ({"data": 2, "replicate": 2}, BFLOAT16),
    "muon_fsdp4": ({"data": 4}, {"optimizer": {"kind": "muon"}}),
    "experts_ep2": ({"data": 4, "expert": 2}, {"kind": "experts"}),
    "experts_ep4_tp2": ({"data": 2, "tensor": 2, "expert": 4}, {"kind": "experts"}),
}
"""Snapshots of four ranks: how they are cut, and of what."""


def _case(name: str, do: Callable[..., Found], parallel: dict[str, int]) -> Callable[[Path], Found]:
    return lambda directory: do(directory, parallel, f"{name}_by_four", **LAYOUTS[name][1])


for _name, (_parallel, _) in LAYOUTS.items():
    globals()[f"{_name}_by_four"] = _case(_name, _saved, _parallel)
    globals()[f"{_name}_on_four"] = _case(_name, _restored, _parallel)
    globals()[f"{_name}_on_two"] = _case(_name, _restored, {"data": 2})


def shards_peak(directory: Path) -> Found:
    """The greatest private memory of this rank while it saves, beyond what it had, and the bytes of its own shard."""
    learner = _learner(directory, {"data": 2}, kind="large")
    learner.train(random_batch(num_samples=2))
    grown = peak(partial(_save, learner, directory / "large_by_two"))
    own = (directory / "large_by_two" / f"shard-{learner.ranks.rank + 1:05d}-of-00002.safetensors").stat().st_size
    return {"grown": grown, "own": own}


def peak(work: Callable[[], None]) -> int:
    """Return the growth of this process's private memory during ``work``, in bytes, at its greatest."""
    before, most, over = _private(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], _private())

    watching = threading.Thread(target=watch)
    watching.start()
    work()
    over.set()
    watching.join()
    return most[0] - before


def _private() -> int:
    """The memory of this process that is of no file, in bytes."""
    words = Path("/proc/self/status").read_text(encoding="utf-8").split("RssAnon:")[1].split()
    return int(words[0]) * 1024
