"""The speed of sandbox sessions (start, command, snapshot, fork), and the memory and time of many sessions at once.

A *session* is a long-lived sandbox with files and a shell; a *driver* starts sessions in one kind of sandbox.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from headrace.base.clock import RealClock
from headrace.wings.bench.base import Report, Row, Target, at_most, make_report
from headrace.wings.sandboxes import SandboxDriver, SandboxSession, SandboxSpec, open_sandboxes
from headrace.wings.sandboxes.pool import SessionPool

T = TypeVar("T")
ROUNDS = 20
SESSIONS = 32
"""The number of sessions that run at once."""
COMMANDS = 4
"""The number of commands that each of these sessions runs."""
TREE = "for i in $(seq 200); do mkdir -p d$((i % 20)); head -c 100000 /dev/urandom > d$((i % 20))/$i; done"
"""A command that creates a tree of 200 files, 20 MB in total."""
WORK = "python -c 'print(sum(n * n for n in range(100_000)))'; ls -R / 2>/dev/null | head -n 2000 | wc -l"
"""The command that each session runs in the measurement of many sessions."""


def measure(on_progress: Callable[[str], None], *, quick: bool = False) -> Report:
    """Measure the local drivers that this machine has. Return a report with a row for each measurement, and the
    targets: a session from the warm pool within 30 ms; snapshot and fork of a tree of 20 MB within 20 ms by layers or
    200 ms by copies; 32 sessions at once in 1 GiB. With ``quick`` there are fewer rounds. ``on_progress`` is called
    with lines of progress."""
    return asyncio.run(_measure(on_progress, 5 if quick else ROUNDS))


async def _measure(on_progress: Callable[[str], None], rounds: int) -> Report:
    """Measure each driver, with ``rounds`` rounds of the short operations, and return the report. ``on_progress`` is
    called with lines of progress."""
    rows: list[Row] = []
    targets: list[Target] = []
    for kind in ("jail", "bubblewrap"):
        if kind == "bubblewrap" and shutil.which("bwrap") is None:
            on_progress("bubblewrap is not installed: it is left out")
            continue
        async with await open_sandboxes(kind) as driver:
            on_progress(f"{kind}: starts, commands, snapshots, forks")
            times = await _measure_single(driver, rounds)
            rows += [{"kind": kind, "what": what, **_time_columns(seconds)} for what, seconds in times.items()]
            limit_ms = 20.0 if kind == "jail" and "overlay" not in driver.missing else 200.0
            both_ms = 1000 * statistics.median(times["snapshot and fork of 20 MB"])
            pool_ms = 1000 * statistics.median(times["start from the warm pool, first command"])
            targets += [
                at_most(f"{kind}: start from the warm pool, first command", pool_ms, 30.0, "ms"),
                at_most(f"{kind}: snapshot and fork of 20 MB", both_ms, limit_ms, "ms"),
            ]
        async with await open_sandboxes(kind) as driver:
            on_progress(f"{kind}: {SESSIONS} sessions at once")
            row = await _measure_many(driver)
            rows.append({"kind": kind, **row})
            targets.append(at_most(f"{kind}: memory of {SESSIONS} sessions", row["most_mb"], 1024.0, "MiB"))
    return make_report(rows, targets)


async def _measure_single(driver: SandboxDriver, rounds: int) -> dict[str, list[float]]:
    """Measure the operations on a single session of ``driver``. Return the durations of each operation in seconds, one
    for each round."""
    names = ("start", "command", "start from the warm pool, first command", "snapshot of 20 MB", "fork of 20 MB",
             "snapshot and fork of 20 MB", "first command after a fork")  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        session = await _timed(times["start"], driver.start(SandboxSpec()))
        await _timed(times["command"], session.run("true"))
        await session.stop()
    async with SessionPool(driver, SandboxSpec(), ready=2) as pool:
        for _ in range(rounds):
            await pool.fill()
            session = await _timed(times["start from the warm pool, first command"], _first_command(pool))
            await session.stop()
    async with await driver.start(SandboxSpec()) as session:
        await session.run(TREE)
        for _ in range(rounds):
            await session.run("echo more >> d1/1")
            await _snapshot_and_fork(driver, session, times)
    return times


async def _first_command(pool: SessionPool) -> SandboxSession:
    """Take a session from a pool, run a command in it, and return it."""
    session = await pool.take()
    await session.run("true")
    return session


async def _snapshot_and_fork(driver: SandboxDriver, session: SandboxSession, times: dict[str, list[float]]) -> None:
    """Measure one snapshot of ``session`` and one fork of this snapshot, and check that the fork has all files. The
    durations are appended to the lists in ``times``."""
    snapshot = await _timed(times["snapshot of 20 MB"], session.snapshot())
    fork = await _timed(times["fork of 20 MB"], driver.fork(snapshot))
    times["snapshot and fork of 20 MB"].append(times["snapshot of 20 MB"][-1] + times["fork of 20 MB"][-1])
    done = await _timed(times["first command after a fork"], fork.run("ls d*/* | wc -l"))
    assert done.stdout == "200\n"
    await fork.stop()
    await driver.release(snapshot)


async def _measure_many(driver: SandboxDriver) -> Row:
    """Run many sessions of ``driver`` at once, each with a Python program and 2 MB of files. Return a row with the
    durations and the peak memory."""
    clock = RealClock()
    start_s = clock.now()
    sessions = await asyncio.gather(*(driver.start(SandboxSpec()) for _ in range(SESSIONS)))
    started_s = clock.now() - start_s
    most_bytes = 0
    start_s = clock.now()
    for _ in range(COMMANDS):
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_work(session)) for session in sessions]
            while not all(task.done() for task in running):
                most_bytes = max(most_bytes, await asyncio.to_thread(_memory_bytes))
                await asyncio.sleep(0.2)
    seconds = clock.now() - start_s
    await asyncio.gather(*(session.stop() for session in sessions))
    return {
        "what": f"{SESSIONS} sessions at once, {COMMANDS} commands each",
        "started_s": started_s,
        "commands_s": seconds,
        "most_mb": most_bytes / 2**20,
    }


async def _work(session: SandboxSession) -> None:
    """Run :data:`WORK` in a session, and write half a megabyte to a file there."""
    done = await session.run(f"{WORK}; head -c 500000 /dev/urandom >> file")
    assert done.ok, done


def _memory_bytes() -> int:
    """Return the memory in bytes of all descendants of this process, with shared pages in proportion, and of the files
    that are kept in memory."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # the process has just ended
            continue
    return total + _file_bytes()


def _file_bytes() -> int:
    """Return the size in bytes of all files that this machine keeps in memory (``tmpfs``)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Shmem:"))


async def _timed(seconds: list[float], call: Awaitable[T]) -> T:
    """Await ``call``, append its duration in seconds to ``seconds``, and return its result."""
    clock = RealClock()
    start_s = clock.now()
    result = await call
    seconds.append(clock.now() - start_s)
    return result


def _time_columns(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the longest of the durations ``seconds``, in milliseconds, as columns of a row."""
    return {"median_ms": 1000 * statistics.median(seconds), "longest_ms": 1000 * max(seconds)}
