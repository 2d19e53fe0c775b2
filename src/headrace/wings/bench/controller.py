"""The throughput of the controller alone: the episodes and tokens per second that one process handles, with its ledger,
over real sockets to up to a thousand engines that answer at once, and with a learner that takes no time.

With ``before``, an interpreter that has an earlier version of the package, runs of both versions alternate.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

from headrace.wings.bench import controller_batch
from headrace.wings.bench.base import Report, Row, Target, at_least, at_most, make_report

Spec = dict[str, Any]
"""The specification of a run, a JSON object for ``controller_side.py``."""
CASES: dict[str, tuple[Spec, str, float]] = {
    "answers of 4 tokens": (
        {"groups": 1024, "group_size": 4, "tokens": 4, "turns": 1, "given": 0, "episodes": 81_920},
        "episodes_s",
        6000.0,
    ),
    "answers of 2,048 tokens": (
        {"groups": 64, "group_size": 8, "tokens": 2048, "turns": 1, "given": 0, "episodes": 8192},
        "tokens_s",
        700_000.0,
    ),
    "answers of 2,048 tokens, two shards": (
        {"groups": 64, "group_size": 8, "tokens": 2048, "turns": 1, "given": 0, "episodes": 8192, "rollouts": 2},
        "tokens_s",
        1_500_000.0,
    ),
    "answers of 2,048 tokens with 8 experts in 48 layers": (
        {
            "groups": 16,
            "group_size": 8,
            "tokens": 2048,
            "turns": 1,
            "given": 0,
            "episodes": 2048,
            "layers": 48,
            "engines": 64,
        },
        "tokens_s",
        400_000.0,
    ),
    "agents of 20 turns and 16,000 tokens": (
        {"groups": 32, "group_size": 4, "tokens": 200, "turns": 20, "given": 600, "episodes": 2560},
        "tokens_s",
        3_000_000.0,
    ),
}
"""For each case, by its name: the specification of the run, the figure that is compared, and its target per second."""
ENGINES, FLUSH = 1000, 64
"""The number of engines, and the number of tokens in a chunk, which are used if a case does not define them."""
ROUNDS = 3
"""The number of runs of each case in turns with an earlier version. Without one, each case runs once: a run averages
over thousands of episodes, and all cases then take some minutes on two cores."""
QUICK_SHARE = 20
"""The divisor of the numbers of episodes and engines in a quick run."""
MOST_MB = 600.0
"""The largest memory of the controller, in MiB."""
TIMEOUT_S = 600.0
"""The time limit of one run, in seconds."""


def measure(on_progress: Callable[[str], None], quick: bool = False, before: str = "") -> Report:
    """Run every case and return a report with a row for each run and the targets. With the interpreter ``before``, each
    case runs :data:`ROUNDS` times in turns with it. With ``quick``, every case is small and runs once. ``on_progress``
    is called with lines of progress."""
    pythons = {"now": sys.executable, **({"before": before} if before else {})}
    rows: list[Row] = []
    targets: list[Target] = []
    for name, (spec, figure, aim) in CASES.items():
        whole = {"engines": ENGINES, "flush": FLUSH, **spec}
        if quick:
            whole |= {"engines": whole["engines"] // QUICK_SHARE, "episodes": spec["episodes"] // QUICK_SHARE}
        found: dict[str, list[Row]] = {side: [] for side in pythons}
        for round_ in range(ROUNDS if before and not quick else 1):
            for side, python in pythons.items():
                on_progress(f"{name}, {side}, round {round_ + 1}")
                found[side].append({"case": name, "side": side, "engines": whole["engines"], **_run(python, whole)})
                on_progress(f"    {found[side][-1][figure]:,.0f} {figure}, {found[side][-1]['peak_mb']:.0f} MiB")
        rows += [row for side in found.values() for row in side]
        now = statistics.median(row[figure] for row in found["now"])
        targets.append(at_least(f"{name}: {figure}", now, aim, "1/s"))
        targets.append(at_most(f"{name}: peak memory", max(row["peak_mb"] for row in found["now"]), MOST_MB, "MiB"))
        if before:
            ratio = now / statistics.median(row[figure] for row in found["before"])
            targets.append(at_least(f"{name}: {figure} / before", ratio, 1.0, "ratio"))
    of_batch = controller_batch.measure(lambda spec: _run(sys.executable, spec), on_progress, quick=quick)
    return make_report([*rows, *of_batch[0]], [*targets, *of_batch[1]])


def _run(python: str, spec: Spec) -> Row:
    """Run ``spec`` in a new process of the interpreter ``python``, and return the figures of this run."""
    with as_file(files("headrace.wings.bench") / "controller_side.py") as side:
        process = subprocess.run(
            [python, str(side), json.dumps(spec)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    if process.returncode:
        raise RuntimeError(
            f"the controller of {python} ended with status {process.returncode}: {process.stderr[-2000:]}"
        )
    figures: Row = json.loads(process.stdout.splitlines()[-1])
    return figures
