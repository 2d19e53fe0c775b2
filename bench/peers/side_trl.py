"""Train a task with TRL's GRPOTrainer and print the figures as one line of JSON. ``compare.py`` starts this program in
a separate process."""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import load_reward, measure_accuracy
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def batch_reward(reward: Any) -> Any:
    """Return ``reward``, a function of one completion, as a reward function of TRL, which gets all completions of a
    batch at once. An async reward is computed for all completions concurrently."""
    if inspect.iscoroutinefunction(reward):
        import asyncio

        async def score_concurrently(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
            calls = (reward(text, expected) for text, expected in zip(completions, answer, strict=True))
            return list(await asyncio.gather(*calls))

        return score_concurrently

    def score_in_turn(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
        return [reward(text, expected) for text, expected in zip(completions, answer, strict=True)]

    return score_in_turn


class CountingTrainer(GRPOTrainer):
    """A trainer that counts the generated tokens of each step."""

    tokens: list[int]
    """The number of tokens of each generation."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        generation = super()._generate_single_turn(*args, **kwargs)
        self.tokens.append(sum(len(ids) for ids in generation[0]))
        return generation


class StepTimer(TrainerCallback):
    """A callback that records the time at which each step ended, and the learning curve. The time of the accuracy
    measurements is not counted."""

    def __init__(self, every: int, held_out: Path, tokenizer: Any) -> None:
        """Create the callback, which measures the accuracy on the rows in the file ``held_out`` with ``tokenizer``
        after ``every`` steps; 0: never."""
        self.every, self.held_out, self.tokenizer = every, held_out, tokenizer
        self.ends: list[float] = []
        """The time at which each step ended, in seconds."""
        self.curve: list[tuple[float, float]] = []
        """The time and the accuracy of each measurement."""
        self.measuring_s = 0.0
        """The time of all measurements of the accuracy so far."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.ends.append(now - self.start - self.measuring_s)
        if self.every and state.global_step % self.every == 0:
            self.curve.append((self.ends[-1], measure_accuracy(model, self.tokenizer, self.held_out)))
            self.measuring_s += time.perf_counter() - now


def main() -> None:
    """Train the task in the first argument, which is JSON, and print the figures."""
    task = json.loads(sys.argv[1])
    directory, seed = Path(task["directory"]), task["seed"]
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(directory / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    episodes = task["prompts"] * task["group"]
    config = GRPOConfig(
        output_dir=task["scratch"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=seed,
        per_device_train_batch_size=task["micro"], gradient_accumulation_steps=episodes // task["micro"],
        num_generations=task["group"], max_completion_length=task["new_tokens"], temperature=1.0, top_k=0, top_p=1.0,
        max_steps=task["steps"], learning_rate=task["lr"], lr_scheduler_type="constant_with_warmup",
        warmup_steps=task["warmup"], adam_beta1=task["betas"][0], adam_beta2=task["betas"][1], max_grad_norm=1.0,
        beta=0.0, num_iterations=1,
    )  # fmt: skip
    timer = StepTimer(task["every"], directory / "held_out.jsonl", tokenizer)
    trainer = CountingTrainer(
        model=model, reward_funcs=batch_reward(load_reward(directory)), args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows), callbacks=[timer],
    )  # fmt: skip
    trainer.tokens = []
    trainer.train()
    print(json.dumps({"ends": timer.ends, "tokens": trainer.tokens, "curve": timer.curve}))


if __name__ == "__main__":
    main()
