"""The peak memory of one rank of a learner, as torch's memory tracker counts it without computing: tensors and other
ranks are fake."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.learner import head
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.packing import MicroBatch
from headrace.learner.parallel.adapt import adapt
from headrace.learner.parallel.load import distributed
from headrace.learner.parallel.mesh import AnyRanks, Ranks, SingleRank
from headrace.learner.work import MicroBatchStats, StepWork
from headrace.models.attention import NAME
from headrace.models.config import LoraConfig
from headrace.models.load import ready
from headrace.models.lora import add_adapters
from headrace.models.packed.flex import FlexPlan, written_out

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A learner whose memory is counted."""

    model: PreTrainedConfig
    learner: LearnerConfig
    longest: int
    """The tokens of every sample."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    lora: LoraConfig | None = None


class _Tracker(MemTracker):
    """Counts the bytes of all tensors, whatever module has made them: a learner calls its model more than once."""

    supports_higher_order_operators = True
    most_bytes = 0
    """The most bytes so far, within a hundredth."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        if self.now() > 1.01 * self.most_bytes:
            gc.collect()  # fake tensors are parts of cycles
            self.most_bytes = max(self.most_bytes, self.now())

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        return

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        return

    def _pre_bw_hook(self, module: Any, args: Any) -> None:
        return

    def _post_bw_hook(self, module: Any, args: Any) -> None:
        return

    def now(self) -> int:
        return int(self._curr_mem_snap.get(CPU, {"Total": 0})["Total"])


class _MadeUpNumbers(TorchFunctionMode):
    """Answers a program that reads a number from a fake tensor: every test succeeds, and every number is 1."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, RuntimeError) as error:
            name, tensor = func.__name__, args[0] if args else None
            if name in ("item", "__float__", "__int__", "__bool__", "__index__", "allclose", "equal"):
                return {"__int__": 1, "__index__": 1, "__float__": 1.0, "item": 1.0}.get(name, True)
            if name in ("numpy", "tolist") and isinstance(tensor, torch.Tensor):
                ones = np.ones(tuple(tensor.shape), np.float32)
                return ones if name == "numpy" else ones.astype(int).tolist()
            raise error


def peak_bytes(case: Case) -> int:
    """Return the most bytes that a rank of this learner holds at a time in a step of two micro-batches or more, with
    the optimizer's state of earlier steps. Every pass has a backward pass, since the ranks of a sharded model would
    otherwise keep gathered weights."""
    with _as_on_a_gpu(), _ranks(case) as ranks, ExitStack() as stack:
        meshes = _meshes(case, ranks)
        stack.enter_context(_prompt_collection())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_MadeUpNumbers())
        tracker, model = _Tracker(), _model(case, ranks, meshes)
        tracker.track_external(model)
        with tracker:
            learner = _learner(case, ranks, model)
        batch = make_batch(case.learner.tokens_per_microbatch // case.longest, case.longest)
        work = _work(batch)
        micro = MicroBatch.whole(batch.lengths_S)
        with tracker:
            _pass(learner, work, micro)
            learner._optimizer.allocate()
            _pass(learner, work, micro)
            learner._optimizer.clip_norms(1.0)
            learner._optimizer.step(1e-3)
        return tracker.most_bytes


def _pass(learner: LearnerCore, work: StepWork, micro: MicroBatch) -> None:
    learner._optimizer.expect(last=True)
    learner._backward_micro(work, micro, MicroBatchStats())
    gc.collect()
    learner._optimizer.collect()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Compute with the tiles of a GPU, and without what needs numbers: probes of routers, and files of a base."""
    with (
        mock.patch.dict(head.TILES, {"cpu": head.LARGE_TILE}),
        mock.patch("headrace.learner.forward._find_replayable_routing", return_value=None),
        mock.patch("headrace.models.lora.prefixes_in_base", return_value={}),
    ):
        yield


@contextmanager
def _ranks(case: Case) -> Iterator[AnyRanks]:
    parallel = case.learner.parallel
    if parallel.world == 1:
        yield SingleRank(CPU)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parallel.world)
    try:
        yield Ranks(parallel, CPU)
    finally:
        dist.destroy_process_group()


def _learner(case: Case, ranks: AnyRanks, model: PreTrainedModel) -> LearnerCore:
    context = LearnerContext(temperature=1.0, total_steps=10, model_dir=Path(), clock=RealClock())
    learner = LearnerCore(model, case.learner, Objective.build(AlgoConfig()), context, ranks)
    if case.learner.attention == "auto":  # what a GPU uses
        plan = partial(FlexPlan, compute=written_out)
        learner._forward.attention = replace(learner._forward.attention, name="flex", plan=plan, compute=written_out)
    return learner


def _model(case: Case, ranks: AnyRanks, meshes: Any) -> PreTrainedModel:
    dtype = getattr(torch, case.dtype)
    model: Any = AutoModelForCausalLM.from_config(case.model, dtype=dtype, attn_implementation=NAME)
    if isinstance(ranks, Ranks):
        settings = distributed(ranks.config, case.model, dtype)
        model = type(model).maybe_distribute_model(model, settings, meshes)
    with mock.patch.object(torch.nn.Module, "to", lambda module, *_args, **_kwargs: module):  # it would swap weights
        if case.lora is not None and isinstance(ranks, Ranks):
            adapt(model, case.lora, "", ranks)
        elif case.lora is not None:
            add_adapters(model, case.lora, "")
    return ready(model)


def _meshes(case: Case, ranks: AnyRanks) -> Any:
    """The meshes of transformers; making them reads numbers, so that it is done before tensors are fake."""
    if not isinstance(ranks, Ranks):
        return None
    settings = distributed(ranks.config, case.model, getattr(torch, case.dtype))
    return PreTrainedModel.prepare_distribute_model(settings)[2]


@contextmanager
def _prompt_collection() -> Iterator[None]:
    """Let the collection of garbage leave out all that exists already, so that it may be frequent."""
    excluded = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not excluded:
            gc.unfreeze()


def make_batch(num: int, length: int, step: int = 0) -> Batch:
    """Samples of equal length, of one group."""
    total = num * length
    starts_N = np.arange(total) % length == 0
    return Batch(
        step=step,
        lengths_S=np.full(num, length, np.int32),
        groups_S=np.zeros(num, np.int32),
        episodes_S=np.arange(num, dtype=np.int32),
        ids_N=np.arange(total, dtype=np.int32) % 13,
        mask_N=~starts_N,
        logprobs_N=np.where(starts_N, 0, -1).astype(np.float32),
        versions_N=np.where(starts_N, -1, step).astype(np.int32),
        advantages_N=np.ones(total, np.float32),
    )


def _work(batch: Batch) -> StepWork:
    weights_N = torch.from_numpy(batch.mask_N.astype(np.float32))
    return StepWork(batch=batch, mask_N=batch.mask_N, weights_N=weights_N)


def allocated_bytes(learner: LearnerCore, batches: list[Batch]) -> int:
    """Return the most bytes that torch's allocator has given out at a time while a learner trains ``batches``, with the
    weights that the learner has already."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for batch in batches:
            learner.train(batch)
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most + sum(weight.nbytes for weight in learner.model.parameters())
