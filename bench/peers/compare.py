"""Headrace beside other programs on this machine: same model, rows, reward, batch, optimizer and threads, in turn.

    python bench/peers/compare.py [--task demo --task long --task slow] [--pairs 3] [--seed 0] [--out FILE.json]
    python bench/peers/compare.py --quick                                   # only show that it runs

Each pair runs one side after the other, in an order that alternates. Printed and written: trained tokens a second
(medians over pairs, ratios within pairs), seconds to the same held-out accuracy, the most memory held (the sum of the
proportional shares of all processes of a side), versions and machine. Beside ``FILE.json`` goes a picture, for which
matplotlib has to be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
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
LOOK_S = 2.0
"""Seconds between two looks at the memory. A look takes 20 ms of processor time for each large process, so that four of
them a second would take a tenth of this machine from the side that has more processes."""
LIMIT_S = 3600.0
SKIPPED = 2
"""First steps, which warm up caches and compilers, count for no rate."""
GOAL = 0.9
"""Held-out accuracy that is raced for."""
SPEED = {"demo": 3.0, "long": 3.0, "slow": 5.0}
"""How many times the peer's trained tokens a second are aimed at."""


def as_json(name: str, rows: list[Any], targets: list[Any]) -> str:
    """The result of a comparison, whose rows stand under ``name``."""
    whole = make_report(rows, targets)
    versions = {**whole.versions, "trl": version("trl")}
    found = {"machine": whole.machine, "versions": versions, name: rows, "targets": targets}
    return json.dumps(msgspec.to_builtins(found), indent=1)


def main() -> None:
    """Run what is asked for, print it, and write it down."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--task", action="append", choices=tuple(TASKS))
    asked.add_argument("--pairs", type=int, default=3)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    asked.add_argument("--max-age", type=int, help="of Headrace's tokens, in versions; unset: what tasks.py says")
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--out", type=Path)
    given = asked.parse_args()
    rows, targets = [], []
    for name in given.task or TASKS:
        pairs = []
        for pair in range(1 if given.quick else given.pairs):
            pairs.append({})
            for side in SIDES[:: 1 if pair % 2 else -1]:
                with tempfile.TemporaryDirectory(prefix="headrace-peers-") as scratch:
                    task = TASKS[name](Path(scratch) / "task", given.seed + pair)
                    settings = {
                        **asdict(task), "directory": str(task.directory), "scratch": f"{scratch}/run",
                        "seed": given.seed + pair, "threads": given.threads,
                    }  # fmt: skip
                    if given.max_age is not None:
                        settings["max_age"] = given.max_age
                    if given.quick:
                        settings |= {"steps": SKIPPED + 2, "every": 2 if task.every else 0}
                    pairs[-1][side] = measured(side, settings, task)
                print(name, pair, side, json.dumps(told(pairs[-1][side])), file=sys.stderr, flush=True)
        rows += [{"task": name, "pair": index, **pair} for index, pair in enumerate(pairs)]
        targets += judged(name, pairs)
    text = as_json("rows", rows, targets)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
        from drawing import draw  # needs matplotlib, which Headrace does without: the figures are safe by now

        draw(json.loads(text), given.out.with_suffix(".png"))


def measured(side: str, settings: dict[str, Any], task: Task) -> dict[str, Any]:
    """One run of one side."""
    clock = RealClock()
    start_s = clock.now()
    command = [sys.executable, str(HERE / f"side_{side}.py"), json.dumps(settings)]
    most = 0
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(command, stdout=said, stderr=complained, cwd=HERE)
        while process.poll() is None:
            most = max(most, held_bytes(process.pid))
            if clock.now() - start_s > LIMIT_S:
                process.kill()
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        said.seek(0)
        complained.seek(0)
        if process.returncode:
            raise SystemExit(f"{side} ended with {process.returncode}:\n{complained.read()[-4000:]}")
        found = json.loads(said.read().splitlines()[-1])
    found |= {"wall_s": clock.now() - start_s, "memory_mb": most / 2**20}
    seconds = found["ends"][-1] - found["ends"][SKIPPED - 1]
    found["tok_s"] = sum(found["tokens"][SKIPPED:]) / seconds
    if side == "headrace" and task.every:
        found["curve"] = curve(settings, found["ends"])
    found["goal_s"] = next((at_s for at_s, right in found["curve"] if right >= GOAL), None)
    return found


def curve(settings: dict[str, Any], ends: list[float]) -> list[tuple[float, float]]:
    """Accuracy of each snapshot, by when its step ended."""
    import torch
    from accuracy import accuracy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    points = []
    directory = Path(settings["directory"])
    tokenizer = AutoTokenizer.from_pretrained(directory / "model", padding_side="left")
    for snapshot in sorted(Path(settings["scratch"]).glob("checkpoints/step-*")):
        model = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.float32)
        step = int(snapshot.name.removeprefix("step-"))
        points.append((ends[step - 1], accuracy(model, tokenizer, directory / "held_out.jsonl")))
    return points


def held_bytes(pid: int) -> int:
    """Memory of a process and its children; what several share counts once."""
    total = 0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for each in family:
        try:
            total += each.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total


def judged(name: str, pairs: list[dict[str, Any]]) -> list[Any]:
    """The figures that are aimed at."""

    def ratio(key: str) -> float | None:
        both = [(pair["headrace"][key], pair["trl"][key]) for pair in pairs]
        known = [ours / theirs for ours, theirs in both if ours is not None and theirs is not None]
        return statistics.median(known) if known else None

    targets = [at_least(f"{name}: trained tokens/s, Headrace / TRL", ratio("tok_s") or 0.0, SPEED[name], "ratio")]
    targets.append(at_most(f"{name}: most memory, Headrace / TRL", ratio("memory_mb") or 0.0, 1.0, "ratio"))
    goal = ratio("goal_s")
    if goal is not None:
        targets.append(at_most(f"{name}: seconds to {GOAL:.0%} held out, Headrace / TRL", goal, 1 / 3, "ratio"))
    return targets


def told(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run without their columns."""
    return {key: value for key, value in found.items() if key not in ("ends", "tokens", "curve")}


if __name__ == "__main__":
    main()
