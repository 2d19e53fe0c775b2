"""What both sides are judged by, with the same code: the share of held-out rows that a model answers rightly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch


def user_reward(directory: Path) -> Any:
    """``reward`` of ``reward.py``."""
    spec = importlib.util.spec_from_file_location("task_reward", directory / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, held_out: Path, new_tokens: int = 4) -> float:
    """By sampling at temperature 1, one answer to a row, from a seed that is always the same."""
    reward = user_reward(held_out.parent)
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    training, state = model.training, torch.get_rng_state()
    model.eval()
    torch.manual_seed(0)
    ids = model.generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=new_tokens, do_sample=True,
        temperature=1.0, top_k=0, top_p=1.0,
    )  # fmt: skip
    torch.set_rng_state(state)
    model.train(training)
    texts = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    right = [reward(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)
