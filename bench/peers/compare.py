"""Compare reinforcement learning in Headrace with other programs on this machine, one after the other, with the same
model, rows, reward, batch, optimizer and threads.

    python bench/peers/compare.py [--task demo --task long --task slow] [--pairs 3] [--seed 0] [--out FILE.json]
    python bench/peers/compare.py --task slow --steps 240 --every 20        # also the seconds to the same accuracy
    python bench/peers/compare.py --quick                                   # only check that it runs

A pair is one run of each side, one after the other; the order alternates between pairs. The program prints and writes
the trained tokens per second (medians over pairs, ratios within pairs), the seconds to the same held-out accuracy, the
peak memory (the sum of the proportional set sizes of all processes of a side), the versions and the machine. It also
writes a picture next to ``FILE.json``, which requires matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tasks import TASKS, Task

from headrace.base.clock import RealClock
from headrace.wings.bench.base import at_least, at_most, make_report

HERE = Path(__file__).parent
SIDES = ("headrace", "trl")
MEMORY_INTERVAL_S = 2.0
"""The seconds between two measurements of the memory. A measurement takes 20 ms of processor time for each large
process, so four measurements per second would take a tenth of this machine from the side with more processes."""
LIMIT_S = 3600.0
"""The time limit of one run, in seconds."""
SKIPPED = 2
"""The number of first steps that are left out of rates, because they warm up caches and compilers."""
GOAL = 0.9
"""The held-out accuracy, from 0 to 1, to which the time is measured."""
SPEED = {"demo": 3.0, "long": 3.0, "slow": 5.0}
"""The target ratio of Headrace's trained tokens per second to those of the other program, by task."""


def as_json(name: str, rows: list[Any], targets: list[Any]) -> str:
    """Return the result of a comparison as JSON text: ``targets``, versions and machine, and ``rows`` under the key
    ``name``."""
    report = make_report(rows, targets)
    versions = {**report.versions, "trl": version("trl")}
    figures = {"machine": report.machine, "versions": versions, name: rows, "targets": targets}
    return json.dumps(msgspec.to_builtins(figures), indent=1)


def main() -> None:
    """Run the comparisons that the command line names, print the result, and write it to the file ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=tuple(TASKS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--max-age", type=int, help="largest age of Headrace's tokens; unset: the task's")
    parser.add_argument("--steps", type=int, help="number of steps; unset: the task's")
    parser.add_argument("--every", type=int, help="steps between two measurements of accuracy; unset: the task's")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows, targets = [], []
    for name in given.task or TASKS:
        pairs = []
        for pair in range(1 if given.quick else given.pairs):
            pairs.append({})
            with tempfile.TemporaryDirectory(prefix="headrace-peers-") as scratch:
                task = TASKS[name](Path(scratch) / "task", given.seed + pair)
                task = replace(task, steps=given.steps or task.steps, every=given.every or task.every)
                settings = {
                    **asdict(task), "directory": str(task.directory), "seed": given.seed + pair,
                    "threads": given.threads,
                }  # fmt: skip
                if given.max_age is not None:
                    settings["max_age"] = given.max_age
                if given.quick:
                    settings |= {"steps": SKIPPED + 2, "every": 2 if task.every else 0}
                for side in SIDES[:: 1 if pair % 2 else -1]:
                    pairs[-1][side] = measure_run(side, {**settings, "scratch": f"{scratch}/{side}"}, task)
                    print(name, pair, side, json.dumps(without_columns(pairs[-1][side])), file=sys.stderr, flush=True)
        rows += [{"task": name, "pair": index, **pair} for index, pair in enumerate(pairs)]
        targets += make_targets(name, pairs)
    text = as_json("rows", rows, targets)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
        from drawing import draw  # here, because it needs matplotlib: the figures are already written

        draw(json.loads(text), given.out.with_suffix(".png"))


def measure_run(side: str, settings: dict[str, Any], task: Task) -> dict[str, Any]:
    """Run ``side`` (``headrace`` or ``trl``) on ``task`` in a new process, with ``settings`` as its argument, and
    return its figures: ``tok_s`` in trained tokens per second, ``memory_mb`` in MiB, ``wall_s`` in seconds, and the
    columns that the process prints. Raises ``SystemExit`` with the end of its standard error if the process fails."""
    clock = RealClock()
    start_s = clock.now()
    command = [sys.executable, str(HERE / f"side_{side}.py"), json.dumps(settings)]
    peak_bytes = 0
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=HERE)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, memory_bytes(process.pid))
            if clock.now() - start_s > LIMIT_S:
                process.kill()
            try:
                process.wait(MEMORY_INTERVAL_S)
            except subprocess.TimeoutExpired:
                continue
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} ended with {process.returncode}:\n{errors.read()[-4000:]}")
        figures = json.loads(output.read().splitlines()[-1])
    figures |= {"wall_s": clock.now() - start_s, "memory_mb": peak_bytes / 2**20}
    seconds = figures["ends"][-1] - figures["ends"][SKIPPED - 1]
    figures["tok_s"] = sum(figures["tokens"][SKIPPED:]) / seconds
    if side == "headrace" and task.every:
        figures["curve"] = accuracy_curve(settings, figures["ends"])
    figures["goal_s"] = next((at_s for at_s, right in figures["curve"] if right >= GOAL), None)
    return figures


def accuracy_curve(settings: dict[str, Any], ends: list[float]) -> list[tuple[float, float]]:
    """Return the learning curve of a run of Headrace: for each snapshot the time at which its step ended, in seconds,
    and the held-out accuracy. ``ends`` has the end of each step, and ``settings`` the directories of the run."""
    import torch
    from accuracy import measure_accuracy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    points = []
    directory = Path(settings["directory"])
    tokenizer = AutoTokenizer.from_pretrained(directory / "model", padding_side="left")
    for snapshot in sorted(Path(settings["scratch"]).glob("checkpoints/step-*")):
        model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
        step = int(snapshot.name.removeprefix("step-"))
        points.append((ends[step - 1], measure_accuracy(model, tokenizer, directory / "held_out.jsonl")))
    return points


def memory_bytes(pid: int) -> int:
    """Return the memory of the process ``pid`` and its child processes, in bytes; memory that several of them share
    counts once. 0 if the process has ended."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total


def make_targets(name: str, pairs: list[dict[str, Any]]) -> list[Any]:
    """Return the targets of the task ``name`` with the figures of ``pairs``: speed, memory and, if all sides reached
    it, the time to :data:`GOAL`."""

    def ratio(key: str) -> float | None:
        """Return the median over pairs of Headrace's figure ``key`` divided by TRL's; ``None`` if no pair has both."""
        both = [(pair["headrace"][key], pair["trl"][key]) for pair in pairs]
        known = [ours / theirs for ours, theirs in both if ours is not None and theirs is not None]
        return statistics.median(known) if known else None

    targets = [at_least(f"{name}: trained tokens/s, Headrace / TRL", ratio("tok_s") or 0.0, SPEED[name], "ratio")]
    targets.append(at_most(f"{name}: most memory, Headrace / TRL", ratio("memory_mb") or 0.0, 1.0, "ratio"))
    goal = ratio("goal_s")
    if goal is not None:
        targets.append(at_most(f"{name}: seconds to {GOAL:.0%} held out, Headrace / TRL", goal, 1 / 3, "ratio"))
    return targets


def without_columns(figures: dict[str, Any]) -> dict[str, Any]:
    """Return those of the ``figures`` of a run that are single numbers, without those with a value for each step."""
    return {key: value for key, value in figures.items() if key not in ("ends", "tokens", "curve")}


if __name__ == "__main__":
    main()
