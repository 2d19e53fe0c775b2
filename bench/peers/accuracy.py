"""The held-out accuracy of a model: the fraction of rows that it answers correctly. All sides are measured with this
code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch


def load_reward(directory: Path) -> Any:
    """Return the reward function that both sides train with: ``reward`` in the file ``reward.py`` of ``directory``."""
    return _load_functions(directory).reward


def _load_check(directory: Path) -> Any:
    """Return the function that checks held-out answers: ``right`` in the file ``reward.py`` of ``directory`` if the
    reward is slow, otherwise the reward itself."""
    functions = _load_functions(directory)
    return getattr(functions, "right", functions.reward)


def _load_functions(directory: Path) -> Any:
    """Return the file ``reward.py`` of ``directory`` as a module."""
    spec = importlib.util.spec_from_file_location("task_reward", directory / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def measure_accuracy(model: Any, tokenizer: Any, held_out: Path, new_tokens: int = 4) -> float:
    """Return the fraction of the rows in the file ``held_out`` that ``model``, with its ``tokenizer``, answers
    correctly, from 0 to 1. One answer of at most ``new_tokens`` tokens is sampled for each row at temperature 1, always
    with the same seed. The state of torch's random generator is not changed."""
    check = _load_check(held_out.parent)
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
    right = [check(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)
