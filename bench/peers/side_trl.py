"""TRL's GRPOTrainer on a task: run by compare.py in a process of its own. Prints one JSON line."""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import accuracy, user_reward
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def rewards_of(reward: Any) -> Any:
    """TRL's form: all completions of a batch at once. An async reward runs for all of them side by side."""
    if inspect.iscoroutinefunction(reward):
        import asyncio

        async def together(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
            calls = (reward(text, given) for text, given in zip(completions, answer, strict=True))
            return list(await asyncio.gather(*calls))

        return together

    def each(completions: list[str], answer: list[Any], **_: Any) -> list[float]:
        return [reward(text, given) for text, given in zip(completions, answer, strict=True)]

    return each


class Timed(GRPOTrainer):
    """Counts the tokens of each generation."""

    tokens: list[int]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._generate_single_turn(*args, **kwargs)
        self.tokens.append(sum(len(ids) for ids in made[0]))
        return made


class Watch(TrainerCallback):
    """When each step ended, on a clock that stands still while accuracy is measured."""

    def __init__(self, every: int, held_out: Path, tokenizer: Any) -> None:
        self.every, self.held_out, self.tokenizer = every, held_out, tokenizer
        self.ends: list[float] = []
        self.curve: list[tuple[float, float]] = []
        self.out = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        now = time.perf_counter()
        self.ends.append(now - self.start - self.out)
        if self.every and state.global_step % self.every == 0:
            self.curve.append((self.ends[-1], accuracy(model, self.tokenizer, self.held_out)))
            self.out += time.perf_counter() - now


def main() -> None:
    """The task is the first argument, as JSON."""
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
    watch = Watch(task["every"], directory / "held_out.jsonl", tokenizer)
    trainer = Timed(
        model=model, reward_funcs=rewards_of(user_reward(directory)), args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows), callbacks=[watch],
    )  # fmt: skip
    trainer.tokens = []
    trainer.train()
    print(json.dumps({"ends": watch.ends, "tokens": trainer.tokens, "curve": watch.curve}))


if __name__ == "__main__":
    main()
