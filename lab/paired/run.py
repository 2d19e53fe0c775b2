"""The benchmarks ``engine``, ``learner``, ``sync`` and ``loop`` of another checkout and of this one, in alternation.

Both versions have processes of their own that take turns: in every round each does the same work, and which one begins
alternates. A ratio is the median over the rounds of the rate of this code divided by the rate of the other, so that
load on the machine that lasts longer than a round affects both.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.base.clock import RealClock
from headrace.base.environ import child_environment, engine_environment
from headrace.models.tiny import make_tiny
from headrace.wings.bench import engine, learner
from headrace.wings.bench.base import Report, Row, Target, at_least, make_report
from headrace.wings.bench.engine_peers import PeerProcess

BENCHMARKS = ("engine", "learner", "sync", "loop")
SMALLEST_RATIO = 0.98
"""The smallest median ratio at which this code counts as not slower."""
THREADS = 2
SIDE = Path(__file__).with_name("side.py")

Figures = dict[str, float]
Measure = Callable[[int], Figures]
"""A function that measures some figures in the round whose number it is given, and returns rates by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """One version of the code."""

    name: str
    python: str
    """Interpreter in whose environment it is installed."""
    package: str
    """Package of its benchmarks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to both versions."""

    name: str
    model: Path
    side: str
    request: Mapping[str, Any]
    warm_up: Mapping[str, Any]


def measure(
    on_progress: Callable[[str], None],
    *,
    python: str,
    package: str = "headrace.bench",
    benchmarks: tuple[str, ...] = BENCHMARKS,
    rounds: int = 5,
    seconds: float = 3600.0,
) -> Report:
    """Measure the code that ``python`` has installed, with its benchmarks in ``package``, beside this code.
    ``on_progress`` is called with lines of progress.

    Each benchmark has ``rounds`` rounds, but begins none after ``seconds``, so that a machine that others wait for is
    given back in time.
    """
    other = Checkout(name="other", python=python, package=package)
    this = Checkout(name="this", python=sys.executable, package="headrace.wings.bench")
    rows: list[Row] = []
    for benchmark in benchmarks:
        with tempfile.TemporaryDirectory(prefix="headrace-paired-") as scratch, ExitStack() as stack:
            open_side = {"engine": _engine, "learner": _learner}.get(benchmark, _whole)
            sides = [open_side(benchmark, side, Path(scratch), stack) for side in (other, this)]
            rates = _rounds(benchmark, sides, on_progress, rounds=rounds, seconds=seconds)
        rows += [_row(benchmark, name, rates) for name in rates[0][0]]
    return make_report(rows, [_target(row) for row in rows])


def _rounds(
    benchmark: str, sides: list[list[Measure]], on_progress: Callable[[str], None], *, rounds: int, seconds: float
) -> list[tuple[Figures, Figures]]:
    """Measure ``rounds`` rounds of ``benchmark``, or fewer if ``seconds`` have passed before one begins. ``sides`` has
    the measurements of each version."""
    clock = RealClock()
    start_s = clock.now()
    rates: list[tuple[Figures, Figures]] = []
    for turn in range(rounds):
        if turn and clock.now() - start_s > seconds:
            break
        on_progress(f"{benchmark}: round {turn + 1} of {rounds}")
        rates.append(_round(sides, turn))
    return rates


def _round(sides: list[list[Measure]], turn: int) -> tuple[Figures, Figures]:
    """Measure every figure once with each version, one directly after the other; the order alternates with ``turn``."""
    figures: tuple[Figures, Figures] = ({}, {})
    for measures in zip(*sides, strict=True):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            figures[index].update(measures[index](turn))
    return figures


def _row(benchmark: str, name: str, rates: list[tuple[Figures, Figures]]) -> Row:
    ratios = [this[name] / other[name] for other, this in rates]
    return {
        "benchmark": benchmark, "what": name, "other": statistics.median(other[name] for other, _ in rates),
        "this": statistics.median(this[name] for _, this in rates), "ratio": statistics.median(ratios),
        "rounds": len(rates), "lowest": min(ratios), "highest": max(ratios),
    }  # fmt: skip


def _target(row: Row) -> Target:
    return at_least(f"{row['benchmark']}, {row['what']}", row["ratio"], SMALLEST_RATIO, "ratio")


@contextmanager
def _process(
    name: str, command: list[str], environment: dict[str, str] | None, directory: Path
) -> Iterator[PeerProcess]:
    log = directory / f"{name}.log"
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            cwd=directory,
        )  # fmt: skip
    try:
        yield PeerProcess(name, process, log)
    finally:
        process.communicate(timeout=60)


def _whole(benchmark: str, checkout: Checkout, directory: Path, stack: ExitStack) -> list[Measure]:
    """Start the process of one version that measures ``sync`` or ``loop`` as a whole."""
    scratch = directory / checkout.name
    scratch.mkdir()
    command = [checkout.python, "-P", str(SIDE), checkout.package, str(scratch)]
    process = stack.enter_context(_process(checkout.name, command, None, directory))
    return [lambda turn: process.call({"bench": benchmark, "turn": turn})]


def _worker(checkout: Checkout, module: str, job: Job, stack: ExitStack) -> PeerProcess:
    spec = json.dumps({"side": job.side, "model": str(job.model), "threads": THREADS})
    environment = child_environment(THREADS)
    if job.side in ("native", "fed"):
        environment |= engine_environment()
    command = [checkout.python, "-m", f"{checkout.package}.{module}", spec]
    name = f"{checkout.name}-{job.side}-{job.model.name}"
    return stack.enter_context(_process(name, command, environment, job.model.parent))


def _jobs(module: str, jobs: list[Job], checkout: Checkout, stack: ExitStack) -> list[tuple[Job, PeerProcess]]:
    """Start one worker for each side and model, and let it answer every request once in a short form."""
    workers: dict[tuple[str, Path], PeerProcess] = {}
    opened = []
    for job in jobs:
        key = (job.side, job.model)
        if key not in workers:
            workers[key] = _worker(checkout, module, job, stack)
        workers[key].call(job.warm_up)
        opened.append((job, workers[key]))
    return opened


def _model(directory: Path, name: str, spec: Any) -> Path:
    path = directory / name
    return path if path.exists() else make_tiny(path, spec)


def _engine(_: str, checkout: Checkout, directory: Path, stack: ExitStack) -> list[Measure]:
    """Start the processes of the engines of ``checkout``, with their models in ``directory``, until ``stack`` ends;
    return the measurement of each figure."""
    models = {name: _model(directory, name.replace(" ", "-"), spec) for name, spec in engine.MODELS.items()}

    def make_job(name: str, model: str, lengths: tuple[int, ...], **sampling: Any) -> Job:
        """Return the job ``name``: the ``model`` samples answers of the given ``lengths``."""
        request = engine.make_request(lengths, **sampling)
        warm_up = engine.make_request((4,) * len(lengths), **sampling)
        return Job(name=name, model=models[model], side="native", request=request, warm_up=warm_up)

    jobs = [
        make_job("28M, 64 x 64, tok/s", "28M", (64,) * 64),
        make_job("28M, 8 x 128, tok/s", "28M", (128,) * 8),
        make_job("1M, 64 x 128, tok/s", "1M", (128,) * 64),
        make_job("1M, 64 x 128, kept-sets recorded, tok/s", "1M", (128,) * 64, top_p=0.95, record_kept=True),
        make_job("1M experts, 64 x 128, routing recorded, tok/s", "1M experts", (128,) * 64, record_routing=True),
    ]
    commits = {**engine.make_request((128,) * 64), "commits": 100}
    warm_up = {**engine.make_request((8,) * 64), "commits": 4}
    jobs.append(Job(name="28M, commit gap", model=models["28M"], side="fed", request=commits, warm_up=warm_up))
    return [partial(_engine_rate, job, process) for job, process in _jobs("engine_worker", jobs, checkout, stack)]


def _engine_rate(job: Job, process: PeerProcess, turn: int) -> Figures:
    answer = process.call(job.request)
    gaps = answer.get("gaps_s")
    return {job.name: 1 / statistics.median(gaps) if gaps else answer["tokens"] / answer["busy_s"]}


def _learner(_: str, checkout: Checkout, directory: Path, stack: ExitStack) -> list[Measure]:
    """Start the process of the learner of ``checkout``, with its models in ``directory``, until ``stack`` ends; return
    the measurement of each figure."""
    sizes = replace(learner.FULL, short_answers=engine.draw_lengths(16, 96, 384))
    large, experts = _model(directory, "28M", sizes.spec), _model(directory, "experts", engine.EXPERTS)
    full = learner.make_request(sizes.spec, sizes.prompt, sizes.short_answers)
    shared = learner.make_request(sizes.spec, sizes.long_prompt, sizes.short_answers)
    routed = learner.make_request(engine.EXPERTS, sizes.prompt, sizes.short_answers, model=str(experts))
    requests: dict[str, dict[str, Any]] = {
        "training step": full,
        "shared prefixes": {**shared, "settings": {"share_prefixes": True}},
        "LoRA of rank 16": {**full, "lora": {"rank": 16}},
        "routing replay": {**routed, "replay": True},
    }
    jobs = [
        Job(
            name=name, model=large, side="learner", request=request,
            warm_up={**request, "lengths": [16] * 8, "seed": 0},
        )
        for name, request in requests.items()
    ]  # fmt: skip
    return [partial(_learner_rate, job, process) for job, process in _jobs("learner_worker", jobs, checkout, stack)]


def _learner_rate(job: Job, process: PeerProcess, turn: int) -> Figures:
    return {job.name: 1 / process.call({**job.request, "seed": 1 + turn})["seconds"]}
