"""The table for those who come from TRL leaves out none of the options that they may have set."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming_from.md"
COMMON = [
    "output_dir",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "optim",
    "seed",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "report_to",
    "push_to_hub",
    "hub_model_id",
    "eval_strategy",
    "eval_steps",
    "load_best_model_at_end",
    "resume_from_checkpoint",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "deepspeed",
    "fsdp",
    "use_cpu",
    "torch_compile",
]
"""Of ``transformers.TrainingArguments``."""


def test_every_option_of_grpo_and_the_common_ones_of_training_stand_in_the_table() -> None:
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    of_all = {field.name for field in fields(transformers.TrainingArguments)}
    own = {field.name for field in fields(trl.GRPOConfig)} - of_all
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text[text.index("## TRL") : text.index("## verl")]
    assert sorted(name for name in own | set(COMMON) if f"`{name}" not in table) == []
