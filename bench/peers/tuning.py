"""Compare ``headrace sft`` with TRL's SFTTrainer with packing, with the same model, rows, tokens, optimizer and
threads.

    python bench/peers/tuning.py [--pairs 3] [--threads 2] [--out FILE.json]
    python bench/peers/tuning.py --quick                                    # only check that it runs

Each side trains once on all rows, in a separate process; the order of the two sides alternates between pairs. The first
steps, which warm up caches, are left out of rates. Only tokens that carry loss are counted, without padding. The memory
is the peak of the sum of the proportional set sizes of all processes of a side. The target is at least 1.8 times TRL's
tokens per second with at most the same memory.
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
from compare import MEMORY_INTERVAL_S, SKIPPED, as_json, memory_bytes

from headrace.wings.bench.base import at_least, at_most

SIDES = ("headrace", "trl")
SPEED = 1.8
"""The target ratio of Headrace's tokens per second to TRL's."""
NUM_ROWS, QUICK_ROWS = 96, 32
LENGTHS = (256.0, 2000)
"""The mean and the largest length of the rows, in tokens."""
PACK = 2048
"""The number of tokens of one of TRL's packs, and of a micro-batch of Headrace."""
ROWS_PER_STEP = 8


def write_task(directory: Path, num_rows: int) -> None:
    """Write a model with 28M parameters and ``num_rows`` rows of lognormally distributed lengths into ``directory``."""
    import numpy as np

    from headrace.models.tiny import make_tiny
    from headrace.wings.bench.engine import LARGE, draw_lengths

    make_tiny(directory / "model", LARGE)
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(3, 64, max(2, length)).tolist()} for length in draw_lengths(num_rows, *LENGTHS)
    ]  # fmt: skip
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_with_headrace(directory: Path, threads: int) -> list[tuple[float, int]]:
    """Train on the rows in ``directory`` with Headrace, on ``threads`` threads. Return for each step the time at which
    it ended, in seconds, and its number of tokens."""
    from headrace.wings.supervised.session import sft

    with tempfile.TemporaryDirectory() as scratch:
        sft({
            "model": {"path": str(directory / "model")}, "data": {"path": str(directory / "rows.jsonl")},
            "learner": {"lr": 1e-5, "tokens_per_microbatch": PACK}, "observe": {"view": "none", "report": False},
            "run": {"dir": scratch + "/run", "rows_per_step": ROWS_PER_STEP, "threads": threads},
        })  # fmt: skip
        lines = [json.loads(line) for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()]
    return [(line["clock_s"], int(line["metrics"]["tokens"])) for line in lines]


def train_with_trl(directory: Path, threads: int) -> list[tuple[float, int]]:
    """Train on the rows in ``directory`` with TRL, on ``threads`` threads. A step is one pack. Return for each step the
    time at which it ended, in seconds, and its number of tokens."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(threads)
    ends: list[tuple[float, int]] = []

    class StepTimer(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append((time.perf_counter(), 0))

    class CountingTrainer(SFTTrainer):
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
        trainer = CountingTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory / "model"), args=config,
            processing_class=AutoTokenizer.from_pretrained(directory / "model"),
            train_dataset=Dataset.from_list(rows), callbacks=[StepTimer()],
        )  # fmt: skip
        trainer.train()
    return [(end, count) for (end, _), count in zip(ends, counts, strict=True)]


def measure_run(side: str, directory: Path, threads: int) -> dict[str, float]:
    """Train once on all rows in ``directory``, on ``threads`` threads, with ``side`` (``headrace`` or ``trl``) in a new
    process, and return its tokens per second, tokens, steps and peak memory in MiB. Raises ``SystemExit`` with the end
    of its standard error if the process fails."""
    command = [sys.executable, __file__, "--side", side, "--directory", str(directory), "--threads", str(threads)]
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, memory_bytes(process.pid))
            try:
                process.wait(MEMORY_INTERVAL_S)
            except subprocess.TimeoutExpired:
                continue
        for stream in (output, errors):
            stream.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} ended with {process.returncode}:\n{errors.read()[-4000:]}")
        steps = json.loads(output.read().splitlines()[-1])
    seconds = steps[-1][0] - steps[SKIPPED - 1][0]
    tokens = sum(count for _, count in steps[SKIPPED:])
    return {"tok_s": tokens / seconds, "tokens": tokens, "steps": len(steps), "memory_mb": peak_bytes / 2**20}


def make_targets(pairs: list[dict[str, dict[str, float]]]) -> list[Any]:
    """Return the targets for speed and memory with the medians of the ratios within ``pairs``."""

    def ratio(key: str) -> float:
        """Return the median over pairs of Headrace's figure ``key`` divided by TRL's."""
        return statistics.median(pair["headrace"][key] / pair["trl"][key] for pair in pairs)

    return [
        at_least("sft: tokens/s, Headrace / TRL", ratio("tok_s"), SPEED, "ratio"),
        at_most("sft: most memory, Headrace / TRL", ratio("memory_mb"), 1.0, "ratio"),
    ]


def main() -> None:
    """Run all pairs, print the result, and write it to the file ``--out``; with ``--side``, run one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.side:
        train = {"headrace": train_with_headrace, "trl": train_with_trl}[given.side]
        print(json.dumps(train(Path(given.directory), given.threads)))
        return
    pairs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-peers-") as scratch:
        write_task(Path(scratch), QUICK_ROWS if given.quick else NUM_ROWS)
        for number in range(1 if given.quick else given.pairs):
            order = SIDES[:: 1 if number % 2 else -1]
            pairs.append({side: measure_run(side, Path(scratch), given.threads) for side in order})
            print(number, json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    targets = make_targets(pairs)
    text = as_json("pairs", pairs, targets)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
