"""What the ranks of the tests do; each returns numbers that are compared with those of one process."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.base.clock import RealClock
from headrace.base.errors import ComponentDied, HeadraceError
from headrace.learner import head, logits
from headrace.learner.head import HeadMatrix, TopRequest, linear_logprobs, linear_top
from headrace.learner.parallel.config import ParallelConfig
from headrace.learner.parallel.load import load_sharded
from headrace.learner.parallel.mesh import Ranks, explained_rank_loss
from headrace.learner.parallel.shards import gather_each, gather_whole, local_shard, wrap_shard
from headrace.learner.vocabulary import VocabularyPart
from headrace.models import ModelConfig, load_model
from headrace.models.weights import weight_tensors
from tests.learner.builders import random_batch
from tests.learner.sharded import Case, ShardedLearner
from tests.learner.test_head import asked, problem

Found = dict[str, Any]

BUNDLES = {"sequences": "gspo"}
"""The objectives of the kinds that are not trained by GRPO."""

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "fsdp2": ("dense", {"data": 2}),
    "tp2": ("dense", {"tensor": 2}),
    "cp2": ("dense", {"context": 2}),
    "hsdp2": ("dense", {"replicate": 2}),
    "tied_fsdp2": ("tied", {"data": 2}),
    "ep2_fsdp2": ("experts", {"data": 2, "expert": 2}),
    "ep2_tp2": ("experts", {"tensor": 2, "expert": 2}),
    "cp2_ep2": ("experts", {"context": 2, "expert": 2}),
    "fsdp2_gspo": ("sequences", {"data": 2}),
    "cp2_gspo": ("sequences", {"context": 2}),
    "cp2_window": ("window", {"context": 2}),
    "cp2_sinks": ("sinks", {"context": 2}),
    "capped_fsdp2": ("capped", {"data": 2}),
    "falcon_h1_fsdp2": ("falcon_h1", {"data": 2}),
    "mamba2_fsdp2": ("mamba2", {"data": 2}),
    "llama4_fsdp2": ("llama4_text", {"data": 2}),
    "zero_experts_fsdp2": ("zero_experts", {"data": 2}),
    "fsdp4": ("dense", {"data": 4}),
    "fsdp2_tp2": ("dense", {"data": 2, "tensor": 2}),
    "fsdp2_cp2": ("dense", {"data": 2, "context": 2}),
    "cp4": ("dense", {"context": 4}),
    "hsdp2x2": ("dense", {"data": 2, "replicate": 2}),
    "tp2_cp2": ("dense", {"tensor": 2, "context": 2}),
}


def gradients(learner: ShardedLearner) -> dict[str, torch.Tensor]:
    return {one.name: gather_whole(wrap_shard(one.master.grad, one.weight)) for one in learner.optimizer.trained}


def exact(directory: Path, layout: str) -> Found:
    """Loss, metrics and the largest relative difference of gradients from what one process saved."""
    kind, parallel = LAYOUTS[layout]
    learner = _learner(directory, parallel, kind=kind, algo={"bundle": BUNDLES.get(kind, "grpo")})
    metrics = learner.forward_backward(random_batch(num_samples=7))
    expected = _expected(directory, kind)
    worst = {name: _apart(gradient, expected[name]) for name, gradient in gradients(learner).items()}
    name = max(worst, key=worst.__getitem__)
    return {"metrics": metrics, "norm": learner.optimizer.norm(), "worst": [name, worst[name]]}


def _expected(directory: Path, kind: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / f"{kind}.gradients")


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def _case(layout: str) -> Any:
    return lambda directory: exact(directory, layout)


for _layout in LAYOUTS:
    globals()[_layout] = _case(_layout)


def _learner(directory: Path, parallel: dict[str, int], kind: str = "dense", **more: Any) -> ShardedLearner:
    config = {"tokens_per_microbatch": 30, **more.pop("config", {})}
    return ShardedLearner(Case(model_dir=directory / kind, parallel=parallel, config=config, **more))


def _curve(learner: ShardedLearner, steps: range) -> list[list[float]]:
    found = [learner.train(random_batch(step=step, num_samples=7)) for step in steps]
    return [[metrics["loss"], metrics["grad_norm"]] for metrics in found]


def curve(directory: Path) -> Found:
    """Four steps over the shards of two ranks; a snapshot after the second."""
    return _curve_with_snapshot(directory, {"data": 2}, "saved_by_two")


def resume(directory: Path) -> Found:
    """From that snapshot, cut otherwise."""
    return _resume(directory / "saved_by_two", {"tensor": 2})


def four(directory: Path) -> Found:
    """The same over FSDP × TP."""
    return _curve_with_snapshot(directory, {"data": 2, "tensor": 2}, "saved_by_four")


def resume_on_two(directory: Path) -> Found:
    """From the snapshot of four ranks."""
    return _resume(directory / "saved_by_four", {"data": 2})


def _curve_with_snapshot(directory: Path, parallel: dict[str, int], name: str) -> Found:
    learner = _learner(directory, parallel)
    curve = _curve(learner, range(2))
    _save(learner, directory / name)
    return {"curve": curve + _curve(learner, range(2, 4))}


def _save(learner: ShardedLearner, directory: Path) -> None:
    if learner.ranks.is_leader:
        directory.mkdir()
    learner.ranks.wait()
    learner.core.save(directory)


def _resume(snapshot: Path, parallel: dict[str, int]) -> Found:
    learner = _learner(snapshot.parent, parallel, kind=snapshot.name)
    learner.core.restore(snapshot, weights=False)
    return {"step": learner.core.version, "curve": _curve(learner, range(2, 4))}


def experts_snapshot(directory: Path) -> Found:
    """Experts that lie apart are written as such models are, and every tensor travels whole under its own name."""
    learner = _learner(directory, {"data": 2, "expert": 2}, kind="experts")
    full = load_model(ModelConfig(path=str(directory / "experts")))
    expected = weight_tensors(full)
    sent = {name: tensor.clone() for name, tensor in gather_each(weight_tensors(learner.model).items())}
    _save(learner, directory / "experts_saved")
    return {
        "names": list(sent) == list(expected),
        "equal": all(torch.equal(sent[name], expected[name]) for name in expected),
    }


def memory(directory: Path) -> Found:
    """What is kept where changes no bit of a gradient or of an update."""
    out: Found = {}
    reference = None
    for name, settings in {
        "plain": {},
        "recompute": {"recompute": True},
        "offload_activations": {"offload_activations": True},
        "offload_optimizer": {"offload_optimizer": True},
    }.items():
        learner = _learner(directory, {"data": 2}, memory=settings)
        learner.train(random_batch(num_samples=7))
        found = {name: gather_whole(tensor.detach()).clone() for name, tensor in weight_tensors(learner.model).items()}
        reference = reference or found
        out[name] = all(torch.equal(found[name], reference[name]) for name in reference)
    return out


def tiles(directory: Path) -> Found:
    """The gradient by a head in small tiles, and how many passes had such a head, which a matrix has that is whole."""
    whole, calls = logits.linear_logprobs, Counter[str]()
    head.TILES = {"cpu": (4, 5)}
    found = {}
    for name, (kind, layout) in {
        "data": ("dense", {"data": 2}),
        "context": ("tied", {"context": 2}),
        "tensor": ("dense", {"tensor": 2}),
        "tied": ("tied", {"tensor": 2}),
        "capped": ("capped", {"data": 2}),
    }.items():
        logits.linear_logprobs = lambda *args, name=name: (calls.update([name]), whole(*args))[1]
        learner = _learner(directory, layout, kind=kind)
        learner.forward_backward(random_batch(num_samples=7))
        expected = _expected(directory, kind)
        found[name] = max(_apart(gradient, expected[key]) for key, gradient in gradients(learner).items())
    logits.linear_logprobs, head.TILES = whole, {"cpu": (512, 2048)}
    return {"worst": found, "calls": calls}


def vocabulary(directory: Path) -> Found:
    """How far results and gradients of a head whose rows lie on two ranks are from those of the whole head, in float64,
    with rows that differ in number and, in the end, a rank that has none."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    head.TILES = {"cpu": (3, 4)}
    differences, same_ids = {}, []
    for cut, with_kept in itertools.product((6, 11), (False, True)):
        leaves, ids_P, kept = problem(7)
        hidden, weight, bias = leaves
        rows = slice(0, cut) if rank == 0 else slice(cut, None)
        matrices = {
            "whole": HeadMatrix(weight, bias),
            "part": HeadMatrix(weight[rows], bias[rows], VocabularyPart(rows.start, group)),
        }
        found = {}
        for name, matrix in matrices.items():
            results = linear_logprobs(hidden, matrix, asked(ids_P, kept if with_kept else None))
            loss = sum(((1 + place) * (one * one).sum() for place, one in enumerate(results)), torch.zeros(()))
            gradients = torch.autograd.grad(loss, leaves)
            for gradient in gradients[1:] if name == "part" else ():
                dist.all_reduce(gradient)  # each rank has that of its rows
            top_ids, top = linear_top(hidden, matrix, 0.7, TopRequest(num=5, below=9))
            found[name] = ([*results, *gradients, top], top_ids)
        one, other = (found[name][0] for name in matrices)
        differences[f"{cut} {with_kept}"] = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
        same_ids.append(torch.equal(found["whole"][1], found["part"][1]))
    head.TILES = {"cpu": (512, 2048)}
    return {"differences": differences, "same ids": all(same_ids)}


class Messages(TorchDispatchMode):
    """Counts what torch sends to other ranks, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


SUMMED: dict[str, tuple[str, dict[str, int]]] = {
    "data": ("dense", {"data": 2}),
    "replicate": ("tied", {"replicate": 2}),
    "context": ("dense", {"context": 2}),
    "expert": ("experts", {"expert": 2, "data": 2}),
}
"""The kinds and layouts whose whole gradients are summed at the end of a batch."""


def summed(directory: Path, name: str) -> Found:
    """Gradients of two batches of several micro-batches, how far they are from those that are summed after every
    micro-batch, and how many messages have summed a batch's: after every micro-batch, and at its end."""
    kind, layout = SUMMED[name]
    (expected, after_each, _), (grads, at_the_end, number) = (
        _summed(directory, kind, layout, whole_gradients=whole_gradients) for whole_gradients in (False, True)
    )
    apart = max(_apart(one, expected[key]) for key, one in grads.items())
    return {"micro-batches": number, "sent": [after_each, at_the_end], "apart": apart}


for _name in SUMMED:
    globals()[f"summed_{_name}"] = lambda directory, name=_name: summed(directory, name)


def _summed(
    directory: Path, kind: str, layout: dict[str, int], *, whole_gradients: bool
) -> tuple[dict[str, torch.Tensor], float, int]:
    """The gradient of two batches, how many messages have summed that of each, and of how many micro-batches."""
    small, memory = {"tokens_per_microbatch": 14}, {"whole_gradients": whole_gradients}
    learner = _learner(directory, layout, kind=kind, memory=memory, config=small)
    batch, messages = random_batch(num_samples=7), Messages()
    with messages if "context" not in layout else nullcontext():  # torch's causal masks know no such mode
        learner.forward_backward(batch)
        learner.forward_backward(batch)
    sent = (messages.counts["_reduce_scatter_base_"] + messages.counts["allreduce_"]) / 2
    return gradients(learner), sent, len(learner.core._forward.pack(batch, batch.mask_N))


def masters(directory: Path) -> Found:
    """Steps of 1e-5 are lost on weights of bfloat16, and kept by float32 copies of them."""
    out: Found = {}
    for kept in (True, False):
        learner = _learner(directory, {"data": 2}, dtype="bfloat16", memory={"masters": kept}, config={"lr": 1e-5})
        before = [one.master.detach().clone() for one in learner.optimizer.trained]
        for step in range(2):
            learner.train(random_batch(step=step, num_samples=7))
        pairs = zip(learner.optimizer.trained, before, strict=True)
        moved = [(one.master.detach() - start).abs().float() for one, start in pairs if one.weight.ndim == 2]
        out[f"moved_{kept}"] = float(torch.cat([part.flatten() for part in moved]).gt(0).float().mean())
        rounded = all(
            torch.equal(local_shard(one.weight.detach()), one.master.detach().bfloat16())
            for one in learner.optimizer.trained
        )
        out[f"rounded_{kept}"] = rounded
    return out


def muon(directory: Path) -> Found:
    """One update of torch's Muon, matrices cut in two, against whole ones in this process."""
    learner = _learner(directory, {"data": 2}, optimizer={"kind": "muon"})
    start = {name: gather_whole(tensor.detach()).clone() for name, tensor in weight_tensors(learner.model).items()}
    learner.forward_backward(random_batch(num_samples=7))
    grads = gradients(learner)
    learner.optimizer.step(1e-2)
    worst = 0.0
    for one in learner.optimizer.trained:
        if one.muon:
            alone = torch.nn.Parameter(start[one.name].clone())
            alone.grad = grads[one.name].clone()
            torch.optim.Muon([alone], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
            moved = (alone.detach() - start[one.name]).norm()
            worst = max(worst, float((gather_whole(one.weight.detach()) - alone.detach()).norm() / moved))
    return {"worst": worst, "matrices": sum(one.muon for one in learner.optimizer.trained)}


def words(directory: Path) -> Found:
    """Orders reach every rank; what ranks say is gathered in order."""
    ranks = Ranks(ParallelConfig(data=2), torch.device("cpu"))
    heard = ranks.broadcast(b"train" if ranks.is_leader else None)
    empty = ranks.broadcast(b"" if ranks.is_leader else None)
    said = ranks.gather(b"x" * (ranks.rank + 1))
    joined = ranks.join_shares(torch.tensor([0.5, 0.0] if ranks.is_leader else [0.0, 0.25]))
    return {
        "heard": heard.decode(),
        "empty": empty.decode(),
        "said": [one.decode() for one in said],
        "joined": joined.tolist(),
    }


def refusals(directory: Path) -> Found:
    """Directories that cannot be loaded: what each rank says of each, and that they go on together after it."""
    ranks, found = Ranks(ParallelConfig(data=2), torch.device("cpu")), {}
    for name in sorted(each.name for each in (directory / "damaged").iterdir()):
        found[name] = _refusal(directory / "damaged" / name, ranks)
    for name in sorted(each.name for each in (directory / "damaged_on_one").iterdir()):  # rank 0 reads a whole one
        found[name] = _refusal(directory / ("damaged_on_one" if ranks.rank else "damaged_on_none") / name, ranks)
    trunk = _refusal(directory / "llama4_text", Ranks(ParallelConfig(tensor=2), torch.device("cpu")))
    found["a change in place"] = trunk
    for name, parallel in {
        "a state": {"context": 2},
        "chosen tokens": {"context": 2},
        "rows of several tensors": {"data": 2},
        "heads": {"tensor": 2},
        "no plan": {"data": 2},
        "no trunk": {"data": 2},
    }.items():
        found[name] = _refusal(directory / name, Ranks(ParallelConfig(**parallel), torch.device("cpu")))
    return found


def _refusal(path: Path, ranks: Ranks) -> list[str]:
    """What each rank says of a directory."""
    try:
        load_sharded(ModelConfig(path=str(path)), ranks)
        said = "loaded"
    except HeadraceError as error:
        said = f"{type(error).__name__}: {error.problem}"
    return [each.decode() for each in ranks.gather(said.encode())]


def idle(directory: Path) -> Found:
    """A batch of one sample: a rank without any work computes beside the other, and adds nothing."""
    batch = random_batch(num_samples=1)
    found = []
    for parallel in ({"data": 2}, {"context": 2}):
        learner = _learner(directory, parallel)
        metrics = learner.forward_backward(batch)
        found.append((metrics["loss"], gradients(learner)))
    (loss, gradient), (expected_loss, expected) = found
    return {"loss": loss - expected_loss, "worst": max(_apart(gradient[name], expected[name]) for name in expected)}


def death(directory: Path) -> Found:
    """The second rank goes away; the first hears of it at once, in words. The last of all cases."""
    ranks = Ranks(ParallelConfig(data=2), torch.device("cpu"))
    if not ranks.is_leader:
        os._exit(0)
    start_s = RealClock().now()
    try:
        with explained_rank_loss(ranks.rank):
            ranks.wait()
    except ComponentDied as error:
        return {"said": str(error), "seconds": RealClock().now() - start_s}
    return {}
