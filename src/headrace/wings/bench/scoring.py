"""The time that the learner waits because of scoring, with a slow judge and a process reward, and the time of the
sandbox.

A pair of runs trains a small model with a fast verifier alone, and with two more scorers: a judge behind HTTP that
takes 0.5 to 2.5 s, and a process reward that takes 0.2 s per turn. Both runs sample and train the same number of tokens
under the same staleness bound, so that scoring must overlap with training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from headrace.models.tiny import TinySpec, make_tiny
from headrace.rollout.scoring.sandbox import run_python
from headrace.run.session import train
from headrace.wings.bench.base import Report, Row, at_most, get_columns, make_report, measure_s

PAIRS = 3
STEPS = 100
ANSWER_TOKENS = 96
SETTINGS = {
    "engine": {"max_new_tokens": ANSWER_TOKENS, "max_sequences": 128},
    "flow": {"groups_per_step": 16, "group_size": 4, "max_age": 6},
    "learner": {"lr": 0.0},
    "launch": {"engine_threads": 1, "learner_threads": 1},
    "observe": {"view": "none", "report": False},
}
"""The settings of both runs. The learning rate is 0, so that both runs of a pair sample from the same weights."""
COLUMNS = (
    *("steps", "tokens_generated", "tokens_trained", "wall_s", "trained_tok_s"),
    *("engine_idle_frac", "learner_idle_frac", "max_token_age"),
)
"""The figures of a run's summary that are columns of its row."""
SANDBOX_RUNS = 20


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Measure pairs of runs, each a run with a fast verifier alone followed by a run with all scorers, and the time of
    the sandbox. Return a report with a row for each run, and the targets, of which the main one is that the learner is
    hardly more idle with slow scorers. With ``quick`` there is one short pair. ``on_progress`` is called with a line of
    text before each run."""
    pairs, steps = (1, 6) if quick else (PAIRS, STEPS)
    rows: list[Row] = []
    more: list[float] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        rewards = stack.enter_context(as_file(files("headrace.wings.bench") / "user_code.py"))
        url = stack.enter_context(_slow_judge())
        tree = {**SETTINGS, "model": {"path": _model(directory)}, "data": {"path": _rows(directory)}}
        for pair in range(pairs):
            idle: list[float] = []
            for what, components in _kinds(rewards, url).items():
                on_progress(f"pair {pair}: {what}")
                run = {"dir": str(directory / f"{pair}-{len(components)}"), "steps": steps, "checkpoint_every": steps}
                summary = train({**tree, "env": {"rewards": components}, "run": run})
                idle.append(summary.learner_idle_frac)
                rows.append({"what": what, "pair": pair, **get_columns(summary, *COLUMNS)})
            more.append(idle[1] - idle[0])
    on_progress("the sandbox")
    sandbox_s = statistics.median(measure_s(_run_empty_program) for _ in range(SANDBOX_RUNS))
    rows.append({"what": "sandbox: start, print, end", "median_s": sandbox_s})
    name = "learner idle with judge and process reward, above outcome only"
    targets = [
        at_most(name, statistics.median(more), 0.05, "fraction"),
        at_most("sandbox: one empty program", sandbox_s, 0.25, "s"),
    ]
    return make_report(rows, targets)


def _kinds(rewards: Path, url: str) -> dict[str, list[dict[str, Any]]]:
    """Return the scorers of the two kinds of runs, by the name of the kind, as the tables ``[[env.rewards]]`` of a run
    file. ``rewards`` is the file of the reward functions, ``url`` the address of the judge."""
    verifier = {"kind": "function", "ref": f"{rewards}:small_digits"}
    process = {"kind": "function", "ref": f"{rewards}:process", "by_turn": True, "weight": 0.5}
    judge = {"kind": "judge", "base_url": url, "model": "any", "weight": 0.1, "concurrency": 256}
    return {"outcome only": [verifier], "verifier, process, judge": [verifier, process, judge]}


def _model(directory: Path) -> str:
    """Write a small model with random weights, and return its directory."""
    spec = TinySpec(
        vocab="0123456789+=",
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=1024,
        max_positions=128,
    )
    return str(make_tiny(directory / "model", spec))


def _rows(directory: Path) -> str:
    """Write the dataset, 100 questions such as ``3+4=``, and return the path of its file."""
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{a}+{a + 1}="}) + "\n" for a in range(100)), encoding="utf-8")
    return str(path)


@contextmanager
def _slow_judge() -> Iterator[str]:
    """Start the slow judge in a process of its own, and yield its URL; the process is killed at the end of the body."""
    program = [sys.executable, "-m", "headrace.wings.bench.slow_judge"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


def _run_empty_program() -> None:
    """Run a program that only prints a number in the sandbox."""
    assert run_python("print(1)").ok
