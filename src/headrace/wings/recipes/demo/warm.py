"""The supervised phase of the demo: the library's own learner imitates the answers of a careless teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.clock import RealClock
from headrace.base.types.batch import Batch, TrainSample
from headrace.base.types.episode import EpisodeKey
from headrace.base.types.tokens import Tokens
from headrace.learner import LearnerConfig
from headrace.learner.base import LearnerContext
from headrace.learner.core import LearnerCore
from headrace.models import ModelConfig, load_model, load_tokenizer
from headrace.wings.recipes.demo.task import Pair, answer, careless, prompt

WARM_STEPS = 400
WARM_BATCH = 128
CARELESS_FRAC = 0.6
"""Fraction of the demonstrations in which the teacher forgets every carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The demonstrations that the model imitates."""

    pairs: list[Pair]
    """The pairs of numbers to add."""
    careless_frac: float = CARELESS_FRAC
    """Fraction of the answers in which every carry is forgotten."""


def warm_start(
    model_dir: Path, out: Path, demonstrations: Demonstrations, *, seed: int, progress: Callable[[int, int], None]
) -> None:
    """Train the model in ``model_dir`` on batches drawn at random from the demonstrations, and write it to ``out``."""
    torch.set_num_threads(1)  # matrices this small gain nothing from more, and lose much on a busy machine
    tokenizer = load_tokenizer(str(model_dir))
    core = LearnerCore(
        load_model(ModelConfig(path=str(model_dir))),
        LearnerConfig(lr=2e-3, warmup_steps=20, betas=(0.9, 0.98), tokens_per_microbatch=4096),
        Objective.build(AlgoConfig.model_validate({"loss": "ce"})),
        LearnerContext(temperature=1.0, total_steps=WARM_STEPS, model_dir=model_dir, clock=RealClock()),
    )
    rng = np.random.default_rng([seed, 1])
    for step in range(WARM_STEPS):
        chosen = [demonstrations.pairs[index] for index in rng.integers(len(demonstrations.pairs), size=WARM_BATCH)]
        forgets = rng.random(WARM_BATCH) < demonstrations.careless_frac
        answers = [careless(pair) if forgot else answer(pair) for pair, forgot in zip(chosen, forgets, strict=True)]
        samples = [
            _demonstration(index, tokenizer.encode(prompt(pair)), [*tokenizer.encode(text), tokenizer.eos_token_id])
            for index, (pair, text) in enumerate(zip(chosen, answers, strict=True))
        ]
        core.train(Batch.collate(step, samples))
        progress(step + 1, WARM_STEPS)
    out.mkdir(parents=True, exist_ok=True)
    core.save(out)


def _demonstration(index: int, prompt_ids: list[int], answer_ids: list[int]) -> TrainSample:
    """Return a train sample whose loss makes the tokens of the answer more likely, given the prompt."""
    return TrainSample(
        key=EpisodeKey(index, 0),
        tokens=Tokens.observed([*prompt_ids, *answer_ids]),
        mask_T=np.array([False] * len(prompt_ids) + [True] * len(answer_ids)),
        advantage=1.0,
    )
