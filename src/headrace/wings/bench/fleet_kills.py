"""The part of the fleet benchmark that kills real engines, one after the other, while a run trains. It measures the
loss, and the time until the throughput has recovered. The run starts each killed engine again; the moment at which this
engine serves requests again is called its *return*."""

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
from headrace.wings.bench.program import run_training
from headrace.wings.recipes.demo import build_demo

FloatArray = NDArray[np.float64]

KILLS, EVERY_S = 18, 10.0
"""The number of attempts to kill an engine, and the time between two attempts, in seconds."""
CALM_S = 20.0
"""The time before the first kill, in seconds, in which the normal throughput is measured."""
START_S, END_S = 180.0, 120.0
"""The longest time to the run's first step, and from the request to stop to the run's end, in seconds."""
FLUSH = 4
"""The number of tokens of a chunk."""
SOON_S = 5.0
"""The longest time after an engine's return within which the throughput should have recovered, in seconds. Returns with
less time until the next kill are not measured."""
WINDOW_S = 2.0
"""The time over which a throughput is averaged, in seconds."""
LEVEL = 0.8
"""The fraction of the normal throughput from which on the run counts as recovered."""
SETTINGS = (
    *("engine.count=3", "launch.engine_restarts=1000", "launch.engine_threads=1", "launch.learner_threads=1"),
    *("engine.temperature=8.0", "engine.max_new_tokens=48", f"engine.flush_tokens={FLUSH}"),
    *("flow.groups_per_step=8", "flow.group_size=4", "flow.max_age=2", "flow.record_tokens=8"),
    *("observe.view=plain", "observe.report=false", "data.eval_path=", "run.steps=100000"),
)
"""Overrides of the demo's run file: three engines that may be started again 1000 times, and more steps than the run
can make during the measurement."""
_RETURN = re.compile(r"it serves again after [\d.]+ s, (\d+) sequences (?:continued|went on)")
"""Matches the line of the run about the return of an engine, with the number of sequences that others continued."""
_STEP = re.compile(r"step \d+/")
"""Matches the beginning of the line of the run about an optimizer step."""


@dataclass(slots=True, kw_only=True)
class _RunObservations:
    """The observed events of a run whose engines are killed. Times are in seconds of the machine's clock, like the
    times in the run's records."""

    kills_s: list[float] = field(default_factory=list)
    """The times at which engines were killed."""
    returns_s: list[float] = field(default_factory=list)
    """The times at which killed engines served requests again."""
    carried_over: list[int] = field(default_factory=list)
    """The number of sequences that other engines continued, for each return."""
    learners: set[int] = field(default_factory=set)
    """The process ids of the learner; more than one if it ended and was started again."""
    first_step: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set when the first step has ended."""


def measure_kills(on_progress: Callable[[str], None]) -> tuple[Row, list[Target]]:
    """Train the demo in a subprocess while its engines are killed one after the other. Return a row of the report and
    its targets: no episode is lost, few tokens are sampled again, and the throughput recovers soon. ``on_progress`` is
    called with lines of progress."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        on_progress("the demo's model")
        demo, run_dir = build_demo(Path(scratch) / "demo", seed=0), Path(scratch) / "run"
        on_progress(f"three engines, of which one is killed every {EVERY_S:g} s")
        with as_file(files("headrace.wings.bench") / "user_code.py") as user_code:
            settings = _set_arguments(*SETTINGS, f"run.dir={run_dir}", f"env.reward={user_code}:partial_credit")
            observed = asyncio.run(_run_with_kills([str(demo.run_file), *settings], run_dir))
        return _evaluate(run_dir, observed)


def _set_arguments(*settings: str) -> list[str]:
    """Return the command-line arguments ``--set SETTING`` for each of ``settings``."""
    return [word for setting in settings for word in ("--set", setting)]


async def _run_with_kills(arguments: Sequence[str], run_dir: Path) -> _RunObservations:
    """Run ``headrace train`` with ``arguments`` in ``run_dir``, kill its engines in turn, and then stop it gracefully;
    return the observed events.

    Raises :class:`~headrace.base.errors.RunError` if the run fails or ends before an engine was killed.
    """
    observed, words = _RunObservations(), ""
    async with run_training(arguments, resume=False) as program, asyncio.TaskGroup() as group:
        reading = group.create_task(_read_output(program, observed))
        killing = group.create_task(_kill_engines(program, run_dir, observed))
        async with asyncio.timeout(START_S + CALM_S + KILLS * EVERY_S + END_S):
            await reading
        killing.cancel()
        assert program.stderr is not None
        words = (await program.stderr.read()).decode()
        failed = await program.wait() or not observed.kills_s
    if failed:
        raise RunError(f"the run that is disturbed failed: {words[-2000:]}", remedy="mend that first")
    return observed


async def _kill_engines(program: asyncio.subprocess.Process, run_dir: Path, observed: _RunObservations) -> None:
    """Wait for the first step and :data:`CALM_S` seconds more, kill one engine every :data:`EVERY_S` seconds in turn,
    and then stop the run with SIGINT. Add the kills to ``observed``."""
    await observed.first_step.wait()
    await asyncio.sleep(CALM_S)
    for number in range(KILLS):
        _kill(run_dir, f"engine-{number % 3}", observed)
        await asyncio.sleep(EVERY_S)
    with suppress(ProcessLookupError):
        program.send_signal(signal.SIGINT)


async def _read_output(program: asyncio.subprocess.Process, observed: _RunObservations) -> None:
    """Read the output of the run until it ends, and add its first step and each return of an engine to
    ``observed``."""
    assert program.stdout is not None
    async for line in program.stdout:
        if _STEP.match(line.decode()):
            observed.first_step.set()
        elif back := _RETURN.search(line.decode()):
            observed.returns_s.append(RealClock().now())
            observed.carried_over.append(int(back[1]))


def _kill(run_dir: Path, role: str, observed: _RunObservations) -> None:
    """Kill the process of the engine ``role``, such as ``engine-0``, if this engine is ready by the run's status, and
    add the time to ``observed``. Also add the present process id of the learner."""
    status = read_status(run_dir)
    parts = [] if status is None else status.components
    observed.learners |= {part.pid for part in parts if part.role == "learner"}
    for part in parts:
        if part.role == role and part.state == "ready":
            with suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGKILL)
                observed.kills_s.append(RealClock().now())


def _evaluate(run_dir: Path, observed: _RunObservations) -> tuple[Row, list[Target]]:
    """Return the row of the report for a run with kills, and its targets. The figures come from the ledger and the
    metrics of the run, and from the ``observed`` events. ``run_dir`` is the directory of the run."""
    with closing(open_ledger(run_dir)) as ledger:
        conservation = ledger.conservation()
    steps = read_steps(run_dir / METRICS_FILE)
    times_s = np.array([step.clock_s for step in steps])
    generated = np.array([step.generated_tokens for step in steps], np.float64)
    recovered_s = _recovery_times_s(times_s, generated, observed)
    again = int((read_summary(run_dir) or {})["tokens_generated"]) - conservation.tokens.submitted
    interrupted = sum(observed.carried_over) + conservation.episodes.in_flight  # by a kill, or by the end of the run
    gaps_s = np.diff(times_s)
    row: Row = {
        "what": f"{len(observed.kills_s)} kills among 3 engines",
        "returns": len(observed.returns_s),
        "carried_over": sum(observed.carried_over),
        "steps": len(steps),
        "episodes": conservation.episodes.submitted,
        "tokens_again": again,
        "recovered_s": recovered_s,
        "step_gap_p50_s": float(np.median(gaps_s)),
        "step_gap_max_s": float(gaps_s.max()),
    }
    lost = sum(conservation.episodes.dropped.values())
    return row, [
        at_most("episodes lost to kills of real engines", lost, 0, "episodes"),
        at_most("units whose books do not balance", float(not conservation.holds), 0, "runs"),
        at_most("tokens made again per sequence interrupted", again / interrupted, FLUSH, "tokens"),
        at_most("usual throughput again after a return, slowest", max(recovered_s, default=0.0), SOON_S, "s"),
        at_most("learners that ended", len(observed.learners) - 1, 0, "learners"),
    ]


def _recovery_times_s(times_s: FloatArray, generated: FloatArray, observed: _RunObservations) -> list[float]:
    """Return the time, in seconds, until the throughput recovered after each return of an engine. Returns that are
    followed by a kill within :data:`SOON_S` are left out.

    The throughput has recovered when its mean over the last :data:`WINDOW_S` seconds, all after the return, is at least
    the fraction :data:`LEVEL` of the normal throughput, which is the mean over the :data:`CALM_S` seconds before the
    first kill. A throughput that does not recover within :data:`EVERY_S` counts as recovered after :data:`EVERY_S`.
    ``generated`` is the total number of generated tokens at the times ``times_s``; ``observed`` has the times of kills
    and returns.
    """

    def rate(start_s: float, end_s: float) -> float:
        """Return the mean number of generated tokens per second from ``start_s`` to ``end_s``."""
        start, end = np.interp([start_s, end_s], times_s, generated)
        return float(end - start) / (end_s - start_s)

    normal, recoveries_s = rate(observed.kills_s[0] - CALM_S, observed.kills_s[0]), list[float]()
    for back_s in observed.returns_s:
        left_s = min((kill_s - back_s for kill_s in observed.kills_s if kill_s > back_s), default=EVERY_S)
        ends = np.arange(WINDOW_S, EVERY_S, 0.1)
        recovered = [
            float(after) for after in ends if rate(back_s + after - WINDOW_S, back_s + after) >= LEVEL * normal
        ]
        if left_s >= SOON_S:
            recoveries_s.append(min(recovered, default=EVERY_S))
    return recoveries_s
