"""``headrace sft`` beside TRL's SFTTrainer with its packing: the same rows, tokens and threads, alternately.

    python bench/peers/tuning.py --rounds 3 --threads 2

Each side runs in a process of its own. A round is one pass of each over the rows; the first step is left out of its
time. Tokens are those of the rows, without padding.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTHS = (64, 256.0, 2000)
"""Number, mean and greatest length of the rows."""
PACK = 2048
"""Tokens of a pack of TRL's, and of a micro-batch here."""
ROWS_PER_STEP = 8


def make(directory: Path) -> None:
    """A model of 28M parameters, and rows of lognormal lengths."""
    import numpy as np

    from headrace.models.tiny import make_tiny
    from headrace.wings.bench.engine import LARGE, lognormal

    make_tiny(directory / "model", LARGE)
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(3, 100, max(2, length)).tolist()} for length in lognormal(*LENGTHS)
    ]  # fmt: skip
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def headrace(directory: Path, threads: int) -> list[tuple[float, int]]:
    """The end and the tokens of each step."""
    from headrace.wings.supervised.session import sft

    with tempfile.TemporaryDirectory() as scratch:
        sft({
            "model": {"path": str(directory / "model")}, "data": {"path": str(directory / "rows.jsonl")},
            "learner": {"lr": 1e-5, "tokens_per_microbatch": PACK}, "observe": {"view": "none", "report": False},
            "run": {"dir": scratch + "/run", "rows_per_step": ROWS_PER_STEP, "threads": threads},
        })  # fmt: skip
        lines = [json.loads(line) for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()]
    return [(line["clock_s"], int(line["metrics"]["tokens"])) for line in lines]


def trl(directory: Path, threads: int) -> list[tuple[float, int]]:
    """The same of TRL: a step is one pack."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(threads)
    ends: list[tuple[float, int]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append((time.perf_counter(), 0))

    class Counting(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            counts.append(int((inputs["labels"] != -100).sum()))
            return super().compute_loss(model, inputs, *args, **kwargs)

    counts: list[int] = []
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, packing=True,
            max_length=PACK, per_device_train_batch_size=1, num_train_epochs=1, learning_rate=1e-5,
        )  # fmt: skip
        SFTTrainer = Counting
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory / "model"), args=config,
            processing_class=AutoTokenizer.from_pretrained(directory / "model"),
            train_dataset=Dataset.from_list(rows), callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    return [(end, count) for (end, _), count in zip(ends, counts, strict=True)]


def main() -> None:
    """Without ``--side``: all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["headrace", "trl"])
    parser.add_argument("--directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.side:
        steps = {"headrace": headrace, "trl": trl}[given.side](Path(given.directory), given.threads)
        seconds, tokens = steps[-1][0] - steps[0][0], sum(count for _, count in steps[1:])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"tok_s": tokens / seconds, "tokens": tokens, "seconds": seconds, "peak_mb": peak}))
        return
    with tempfile.TemporaryDirectory() as scratch:
        make(Path(scratch))
        ratios = []
        for number in range(given.rounds):
            found = {}
            for side in ("headrace", "trl"):
                command = [sys.executable, __file__, "--side", side, "--directory", scratch]
                said = subprocess.run(
                    [*command, "--threads", str(given.threads)], check=True, capture_output=True, text=True
                )  # fmt: skip
                found[side] = json.loads(said.stdout.splitlines()[-1])
            ratios.append(found["headrace"]["tok_s"] / found["trl"]["tok_s"])
            print(number, round(ratios[-1], 3), found, flush=True)
        print("median ratio", round(statistics.median(ratios), 3))


if __name__ == "__main__":
    main()
