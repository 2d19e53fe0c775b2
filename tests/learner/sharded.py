"""A learner on several ranks, put together as the core is from the parts under test."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from headrace.algo.base import Ratio
from headrace.algo.config import AlgoConfig
from headrace.algo.metrics import add, means
from headrace.algo.objective import Objective, usable
from headrace.learner.config import LearnerConfig
from headrace.learner.intake import layout
from headrace.learner.logits import TokenLogprobs
from headrace.learner.packing import MicroBatch, Packing, plan, singly
from headrace.learner.parallel.config import MemoryConfig, OptimizerConfig, ParallelConfig
from headrace.learner.parallel.files import Snapshot
from headrace.learner.parallel.halves import ShardedLogprobs
from headrace.learner.parallel.load import keep_inputs_only, load_sharded
from headrace.learner.parallel.mesh import Ranks
from headrace.learner.parallel.optim import ShardOptimizer
from headrace.learner.parallel.view import View
from headrace.learner.work import Work
from headrace.models.config import ModelConfig
from headrace.types.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One learner of the tests."""

    model_dir: Path
    parallel: dict[str, object] = field(default_factory=dict)
    memory: dict[str, object] = field(default_factory=dict)
    optimizer: dict[str, object] = field(default_factory=dict)
    algo: dict[str, object] = field(default_factory=lambda: {"bundle": "grpo"})
    config: dict[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    chunk: int = 5


class ShardedLearner:
    def __init__(self, case: Case) -> None:
        parallel = ParallelConfig.model_validate(case.parallel)
        self.ranks = Ranks(parallel, torch.device("cpu"))
        self.model = load_sharded(ModelConfig(path=str(case.model_dir), dtype=case.dtype), self.ranks)
        self.memory = MemoryConfig.model_validate(case.memory)
        if self.memory.recompute:
            keep_inputs_only(self.model)
        self.config = LearnerConfig(**{"lr": 1e-2, **case.config})
        self.optimizer = ShardOptimizer(
            self.model, self.config, OptimizerConfig.model_validate(case.optimizer), self.memory
        )
        self.objective = Objective.build(AlgoConfig.model_validate(case.algo))
        entropy = "entropy" in self.objective.columns
        self.logprobs = ShardedLogprobs(self.model, lambda halves: TokenLogprobs(halves, case.chunk, 1.0, entropy))
        self.files = Snapshot(self.model, self.optimizer, self.ranks)
        self.case = case
        self.step = 0

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        mask, _ = usable(torch.tensor(batch.mask_N), torch.tensor(batch.logprobs_N))
        weights_N = self.objective.weights(layout(batch, mask))
        work = Work(batch=batch, mask_N=mask.numpy(), weights_N=weights_N, old=self.objective.old)
        losses, metrics = [], []
        for micro in self.cut(work):
            with ExitStack() as stack:
                if self.memory.offload_activations:
                    stack.enter_context(torch.autograd.graph.save_on_cpu())
                log_pi_M, entropy_M = self.log_pi(work, micro)
            if not len(micro.places_M):
                (log_pi_M.sum() * 0.0).backward()
            else:
                inputs = work.inputs(micro, log_pi_M, entropy_M)
                output = self.objective(inputs, weights_N[micro.places_M])
                (output.loss * self.ranks.config.averaged).backward()
                losses.append(float(output.loss.detach()))
                metrics.append(output.metrics)
            self.optimizer.collect()
        mine = {name: (float(ratio.total), float(ratio.count)) for name, ratio in add(metrics).items()}
        said = self.ranks.gather_shares(msgspec.json.encode((sum(losses), mine)))
        parts = [msgspec.json.decode(one, type=tuple[float, dict[str, tuple[float, float]]]) for one in said]
        ratios = add([{name: Ratio(*pair) for name, pair in part.items()} for _, part in parts])
        return {**means(ratios), "loss": sum(loss for loss, _ in parts)}

    def train(self, batch: Batch) -> dict[str, float]:
        metrics = self.forward_backward(batch)
        norm = self.optimizer.norm(self.ranks)
        self.optimizer.clip(norm, self.config.max_grad_norm)
        self.optimizer.step(self.config.lr)
        self.step += 1
        return {**metrics, "grad_norm": norm}

    def cut(self, work: Work) -> list[MicroBatch]:
        batch = work.batch
        samples = np.unique(np.repeat(np.arange(len(batch.lengths_S)), batch.lengths_S)[work.mask_N])
        packing = Packing(budget=self.config.tokens_per_microbatch, num_ranks=self.ranks.config.num_shares)
        return plan(batch.lengths_S, singly(samples), packing)[self.ranks.share]

    def log_pi(self, work: Work, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        idle = not len(micro.places_M)  # computed because the others compute: parameters are gathered together
        ids_M = np.zeros(1, np.int64) if idle else work.batch.ids_N[micro.places_M]
        loss_P = np.flatnonzero(work.mask_N[micro.places_M])
        view = View(np.ones(1, np.int64) if idle else micro.lengths_K, loss_P, self.ranks)
        ids_P = torch.from_numpy(ids_M[view.places_P].astype(np.int64))
        log_pi_P, entropy_P = self.logprobs(view.inputs(ids_M), view.before_P(), ids_P)
        return view.join(log_pi_P), view.join(entropy_P)
