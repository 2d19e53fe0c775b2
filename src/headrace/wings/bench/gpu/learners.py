"""Functions of the stages that measure learners: open a learner on the device, in this process, and make random batches
for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.algo.config import AlgoConfig
from headrace.algo.objective import Objective
from headrace.base.types.batch import Batch
from headrace.learner.base import LearnerContext
from headrace.learner.config import LearnerConfig
from headrace.learner.core import LearnerCore
from headrace.models import LoraConfig, ModelConfig, load_model
from headrace.models.devices import use_device
from headrace.wings.bench.gpu.base import StageContext
from headrace.wings.bench.learner_worker import make_batch


def open_learner(
    stage: StageContext, model_dir: Path, dtype: str, settings: Mapping[str, Any], *, rank: int = 0
) -> LearnerCore:
    """Load the model in ``model_dir`` onto the device of ``stage`` in the number format ``dtype``, and return its
    learner, with DAPO's loss. ``settings`` are the settings of the section ``[learner]``. With a ``rank`` above 0, the
    learner trains an adapter of this rank."""
    device = use_device("learner.device", stage.request.device)
    lora = LoraConfig(rank=rank) if rank else None
    config = ModelConfig.model_validate({"path": str(model_dir), "dtype": dtype, "lora": lora})
    context = LearnerContext(temperature=1.0, total_steps=1000, model_dir=model_dir, clock=stage.clock)
    return LearnerCore(
        load_model(config, str(device)),
        LearnerConfig.model_validate({"lr": 1e-6, "share_prefixes": False, **settings}),
        Objective.build(AlgoConfig.model_validate({"loss": "dapo", "correction": "none"})),
        context,
    )


def random_batch(step: int, *, prompt: int, answers: tuple[int, ...], vocab: int, seed: int = 0) -> Batch:
    """Return a batch for training step ``step``: random answers with the lengths ``answers`` to random prompts of
    ``prompt`` tokens, from a vocabulary of ``vocab`` tokens. Equal arguments, with the random ``seed``, yield equal
    samples at any step."""
    return make_batch(step, {"prompt": prompt, "lengths": list(answers), "vocab": vocab, "seed": seed})
