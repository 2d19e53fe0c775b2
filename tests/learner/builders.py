"""A tiny model, batches for it, and a learner over both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerContext, LearnerCore
from headrace.models import ModelConfig, load_model
from headrace.models.tiny import TinySpec, make_tiny

VOCAB = "0123456789+=?"
VOCAB_SIZE = len(VOCAB) + 3


def tiny(directory: Path, **spec: object) -> Path:
    settings = {"hidden_size": 32, "intermediate_size": 48, "init_std": 0.3, **spec}
    return make_tiny(directory, TinySpec(vocab=VOCAB, **settings))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a learner of the tests is built."""

    model_dir: Path
    algo: dict[str, object] = field(default_factory=lambda: {"bundle": "grpo"})
    objective: Objective | None = None
    """Instead of the one that ``algo`` describes."""
    temperature: float = 1.0
    total_steps: int = 10
    config: dict[str, object] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: dict[str, object] | None = None
    deterministic: bool = False

    def learner(self) -> LearnerCore:
        return LearnerCore(
            load_model(
                ModelConfig(
                    path=str(self.model_dir), dtype=self.dtype, lora=self.lora, deterministic=self.deterministic
                )
            ),
            LearnerConfig(**{"lr": 1e-2, **self.config}),
            self.objective or Objective.build(AlgoConfig.model_validate(self.algo)),
            LearnerContext(
                temperature=self.temperature,
                total_steps=self.total_steps,
                model_dir=self.model_dir,
                clock=RealClock(),
            ),
        )


def random_batch(step: int = 0, num_samples: int = 6, seed: int = 0) -> Batch:
    """Prompts of 1 to 4 tokens, completions of 1 to 9, three samples to a group, ages 0 and 1."""
    rng = np.random.default_rng([seed, step])
    prompts, completions = rng.integers(1, 5, num_samples), rng.integers(1, 10, num_samples)
    lengths = (prompts + completions).astype(np.int32)
    mask = np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    total = int(lengths.sum())
    logprobs = -rng.uniform(0.1, 4.0, total)
    versions = np.repeat(np.maximum(0, step - rng.integers(0, 2, num_samples)), lengths)
    return Batch(
        step=step,
        lengths_S=lengths,
        groups_S=(np.arange(num_samples) // 3).astype(np.int32),
        episodes_S=np.arange(num_samples, dtype=np.int32),
        ids_N=rng.integers(0, VOCAB_SIZE, total).astype(np.int32),
        mask_N=mask,
        logprobs_N=np.where(mask, logprobs, 0).astype(np.float32),
        versions_N=np.where(mask, versions, -1).astype(np.int32),
        advantages_N=np.repeat(rng.normal(size=num_samples), lengths).astype(np.float32),
    )


def weights(learner: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.model.named_parameters()}


def gradients(learner: LearnerCore) -> dict[str, torch.Tensor]:
    return {name: tensor.grad.clone() for name, tensor in learner.model.named_parameters() if tensor.grad is not None}


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.int32), second[name].view(torch.int32)), name


def assert_goes_on(setup: Setup, directory: Path, batches: Sequence[Batch]) -> None:
    """A learner that is restored after the first batch ends with the bits of one that was not stopped."""
    first, *later = batches
    unbroken, resumed = setup.learner(), setup.learner()
    unbroken.train(first)
    unbroken.save(directory)
    resumed.restore(directory)
    for learner in (unbroken, resumed):
        for batch in later:
            learner.train(batch)
    assert_same_bits(weights(unbroken), weights(resumed))
    assert unbroken.version == resumed.version == len(batches)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    """``within`` is relative to the largest entry of each tensor: sums of terms of both signs have no better
    measure."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(tensor.double(), expected[name].double(), rtol=0, atol=within * scale, msg=name)
