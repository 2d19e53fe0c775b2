"""Real engines that are killed, one after the other, while a run trains: what is lost, and how soon it is as before."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.base.clock import RealClock
from headrace.base.errors import RunError
from headrace.flow.ledger.opening import open_ledger
from headrace.run.observe.jsonl import METRICS_FILE, read_steps
from headrace.run.session.directory import read_status, read_summary
from headrace.wings.bench.base import Row, Target, at_most
from headrace.wings.bench.program import training
from headrace.wings.recipes.demo import build_demo

FloatArray = NDArray[np.float64]

KILLS, EVERY_S = 18, 10.0
CALM_S = 20.0
"""Before the first kill, to know what is usual."""
START_S, END_S = 180.0, 120.0
"""How long the run may take to its first step, and to its end when it is asked to stop."""
FLUSH = 4
SOON_S = 5.0
WINDOW_S = 2.0
"""Over which a throughput is taken."""
LEVEL = 0.8
"""Of the usual throughput: from there on it counts as recovered."""
SETTINGS = (
    *("engine.count=3", "launch.engine_restarts=1000", "launch.engine_threads=1", "launch.learner_threads=1"),
    *("engine.temperature=8.0", "engine.max_new_tokens=48", f"engine.flush_tokens={FLUSH}"),
    *("flow.groups_per_step=8", "flow.group_size=4", "flow.max_age=2", "flow.record_tokens=8"),
    *("observe.view=plain", "observe.report=false", "data.eval_path=", "run.steps=100000"),
)
_RETURN = re.compile(r"it serves again after [\d.]+ s, (\d+) sequences went on")
_STEP = re.compile(r"step \d+/")


@dataclass(slots=True, kw_only=True)
class _RunObservations:
    """What is told of a run while it is disturbed; times are of the machine's clock, as those of its records."""

    kills_s: list[float] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)
    carried_over: list[int] = field(default_factory=list)
    learners: set[int] = field(default_factory=set)
    """Process ids."""
    first_step: asyncio.Event = field(default_factory=asyncio.Event)


def killed(tell: Callable[[str], None]) -> tuple[Row, list[Target]]:
    """A row and its targets."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        tell("the demo's model")
        demo, run_dir = build_demo(Path(scratch) / "demo", seed=0), Path(scratch) / "run"
        tell(f"three engines, of which one is killed every {EVERY_S:g} s")
        with as_file(files("headrace.wings.bench") / "graded_reward.py") as reward:
            settings = _set(*SETTINGS, f"run.dir={run_dir}", f"env.reward={reward}:reward")
            seen = asyncio.run(_disturbed([str(demo.run_file), *settings], run_dir))
        return _judged(run_dir, seen)


def _set(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


async def _disturbed(arguments: Sequence[str], run_dir: Path) -> _RunObservations:
    """A run from its start until it is asked to stop; :class:`~headrace.base.errors.RunError` where it ends
    otherwise."""
    seen, words = _RunObservations(), ""
    async with training(arguments, resume=False) as program, asyncio.TaskGroup() as group:
        reading = group.create_task(_read(program, seen))
        striking = group.create_task(_strike(program, run_dir, seen))
        async with asyncio.timeout(START_S + CALM_S + KILLS * EVERY_S + END_S):
            await reading
        striking.cancel()
        assert program.stderr is not None
        words = (await program.stderr.read()).decode()
        failed = await program.wait() or not seen.kills_s
    if failed:
        raise RunError(f"the run that is disturbed failed: {words[-2000:]}", remedy="mend that first")
    return seen


async def _strike(program: asyncio.subprocess.Process, run_dir: Path, seen: _RunObservations) -> None:
    """Kill engines, and ask the run to stop."""
    await seen.first_step.wait()
    await asyncio.sleep(CALM_S)
    for number in range(KILLS):
        _kill(run_dir, f"engine-{number % 3}", seen)
        await asyncio.sleep(EVERY_S)
    with suppress(ProcessLookupError):
        program.send_signal(signal.SIGINT)


async def _read(program: asyncio.subprocess.Process, seen: _RunObservations) -> None:
    assert program.stdout is not None
    async for line in program.stdout:
        if _STEP.match(line.decode()):
            seen.first_step.set()
        elif back := _RETURN.search(line.decode()):
            seen.returns_s.append(RealClock().now())
            seen.carried_over.append(int(back[1]))


def _kill(run_dir: Path, role: str, seen: _RunObservations) -> None:
    """That engine, if it is there."""
    status = read_status(run_dir)
    parts = [] if status is None else status.components
    seen.learners |= {part.pid for part in parts if part.role == "learner"}
    for part in parts:
        if part.role == role and part.state == "ready":
            with suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGKILL)
                seen.kills_s.append(RealClock().now())


def _judged(run_dir: Path, seen: _RunObservations) -> tuple[Row, list[Target]]:
    with closing(open_ledger(run_dir)) as ledger:
        books = ledger.conservation()
    steps = read_steps(run_dir / METRICS_FILE)
    times_s = np.array([step.clock_s for step in steps])
    generated = np.array([step.generated_tokens for step in steps], np.float64)
    recovered_s = _recovered_s(times_s, generated, seen)
    again = int((read_summary(run_dir) or {})["tokens_generated"]) - books.tokens.submitted
    interrupted = sum(seen.carried_over) + books.episodes.in_flight  # by a kill, or by the end
    gaps_s = np.diff(times_s)
    row: Row = {
        "what": f"{len(seen.kills_s)} kills among 3 engines",
        "returns": len(seen.returns_s),
        "carried_over": sum(seen.carried_over),
        "steps": len(steps),
        "episodes": books.episodes.submitted,
        "tokens_again": again,
        "recovered_s": recovered_s,
        "step_gap_p50_s": float(np.median(gaps_s)),
        "step_gap_max_s": float(gaps_s.max()),
    }
    lost = sum(books.episodes.dropped.values())
    return row, [
        at_most("episodes lost to kills of real engines", lost, 0, "episodes"),
        at_most("units whose books do not balance", float(not books.holds), 0, "runs"),
        at_most("tokens made again per sequence interrupted", again / interrupted, FLUSH, "tokens"),
        at_most("usual throughput again after a return, slowest", max(recovered_s, default=0.0), SOON_S, "s"),
        at_most("learners that ended", len(seen.learners) - 1, 0, "learners"),
    ]


def _recovered_s(times_s: FloatArray, generated: FloatArray, seen: _RunObservations) -> list[float]:
    """For each return that is followed by :data:`SOON_S` without a kill: how long until the throughput of
    :data:`WINDOW_S` was as usual."""

    def rate(start_s: float, end_s: float) -> float:
        start, end = np.interp([start_s, end_s], times_s, generated)
        return float(end - start) / (end_s - start_s)

    usual, found = rate(seen.kills_s[0] - CALM_S, seen.kills_s[0]), list[float]()
    for back_s in seen.returns_s:
        left_s = min((kill_s - back_s for kill_s in seen.kills_s if kill_s > back_s), default=EVERY_S)
        ends = np.arange(WINDOW_S, EVERY_S, 0.1)
        good = [float(after) for after in ends if rate(back_s + after - WINDOW_S, back_s + after) >= LEVEL * usual]
        if left_s >= SOON_S:
            found.append(min(good, default=EVERY_S))
    return found
