"""A learner on several ranks, as the tests look at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.learner import forward
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.learner.parallel.load import load_on_ranks
from headrace.learner.parallel.mesh import Ranks
from headrace.models.config import ModelConfig
from tests.learner.builders import VOCAB_SIZE


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
    lora: dict[str, object] | None = None


class ShardedLearner:
    def __init__(self, case: Case) -> None:
        parts = {"parallel": case.parallel, "memory": case.memory, "optimizer": case.optimizer}
        config = LearnerConfig.model_validate({"lr": 1e-2, **parts, **case.config})
        forward.LOGITS_PER_CHUNK = case.chunk * VOCAB_SIZE
        self.ranks = Ranks(config.parallel, torch.device("cpu"))
        self.model = load_on_ranks(ModelConfig(path=str(case.model_dir), dtype=case.dtype, lora=case.lora), self.ranks)
        self.core = LearnerCore(
            self.model,
            config,
            Objective.build(AlgoConfig.model_validate(case.algo)),
            LearnerContext(temperature=1.0, total_steps=10, model_dir=case.model_dir, clock=RealClock()),
            self.ranks,
        )
        self.optimizer = self.core._optimizer

    def forward_backward(self, batch: Batch) -> dict[str, float]:
        return self.core.forward_backward(batch).metrics

    def train(self, batch: Batch) -> dict[str, float]:
        return self.core.train(batch).metrics
