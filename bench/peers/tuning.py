"""``headrace sft`` beside TRL's SFTTrainer with its packing: the same model, rows, tokens, optimizer and threads.

    python bench/peers/tuning.py [--pairs 3] [--threads 2] [--out FILE.json]
    python bench/peers/tuning.py --quick                                    # only show that it runs

Each side runs in a process of its own, once over the rows; the two of a pair follow each other, in an order that
alternates. The first steps, which warm up caches, count for no rate. Tokens are those of the rows that carry loss,
without padding. Memory is the most that all processes of a side held, in proportional shares. What is aimed at: at
least 1.8 times TRL's tokens a second, with no more memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from compare import LOOK_S, SKIPPED, as_json, held_bytes

from headrace.wings.bench.base import at_least, at_most

SIDES = ("headrace", "trl")
SPEED = 1.8
"""How many times TRL's tokens a second are aimed at."""
NUM_ROWS, QUICK_ROWS = 96, 32
LENGTHS = (256.0, 2000)
"""Mean and greatest length of the rows."""
PACK = 2048
"""Tokens of a pack of TRL's, and of a micro-batch here."""
ROWS_PER_STEP = 8


def make(directory: Path, num_rows: int) -> None:
    """A model of 28M parameters, and ``num_rows`` rows of lognormal lengths."""
    import numpy as np

    from headrace.models.tiny import make_tiny
    from headrace.wings.bench.engine import LARGE, draw_lengths

    make_tiny(directory / "model", LARGE)
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(3, 64, max(2, length)).tolist()} for length in draw_lengths(num_rows, *LENGTHS)
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
        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(directory / "model"), args=config,
            processing_class=AutoTokenizer.from_pretrained(directory / "model"),
            train_dataset=Dataset.from_list(rows), callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    return [(end, count) for (end, _), count in zip(ends, counts, strict=True)]


def measured(side: str, directory: Path, threads: int) -> dict[str, float]:
    """One pass of one side over the rows."""
    command = [sys.executable, __file__, "--side", side, "--directory", str(directory), "--threads", str(threads)]
    most = 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(command, stdout=said, stderr=complained)
        while process.poll() is None:
            most = max(most, held_bytes(process.pid))
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        for words in (said, complained):
            words.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} ended with {process.returncode}:\n{complained.read()[-4000:]}")
        steps = json.loads(said.read().splitlines()[-1])
    seconds = steps[-1][0] - steps[SKIPPED - 1][0]
    tokens = sum(count for _, count in steps[SKIPPED:])
    return {"tok_s": tokens / seconds, "tokens": tokens, "steps": len(steps), "memory_mb": most / 2**20}


def judged(pairs: list[dict[str, dict[str, float]]]) -> list[Any]:
    """The figures that are aimed at: medians of the ratios within pairs."""

    def ratio(key: str) -> float:
        return statistics.median(pair["headrace"][key] / pair["trl"][key] for pair in pairs)

    return [
        at_least("sft: tokens/s, Headrace / TRL", ratio("tok_s"), SPEED, "ratio"),
        at_most("sft: most memory, Headrace / TRL", ratio("memory_mb"), 1.0, "ratio"),
    ]


def main() -> None:
    """Run all pairs, or one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.side:
        print(json.dumps({"headrace": headrace, "trl": trl}[given.side](Path(given.directory), given.threads)))
        return
    pairs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as scratch:
        make(Path(scratch), QUICK_ROWS if given.quick else NUM_ROWS)
        for number in range(1 if given.quick else given.pairs):
            order = SIDES[:: 1 if number % 2 else -1]
            pairs.append({side: measured(side, Path(scratch), given.threads) for side in order})
            print(number, json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    targets = judged(pairs)
    text = as_json("pairs", pairs, targets)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
