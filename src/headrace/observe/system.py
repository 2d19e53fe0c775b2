"""What the processes of a run take of their machine."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import psutil

from headrace.clock import Clock

Part = tuple[str, int]
"""Role and pid of a process."""


class SystemWatch:
    """Reads memory and processor time of the parts; those of one kind (``scorer-0``, ``scorer-1``) are added up."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._processes: dict[int, psutil.Process] = {}
        self._before: dict[int, tuple[float, float]] = {}

    def read(self, parts: Iterable[Part]) -> dict[str, float]:
        """``memory/{part}`` in bytes, ``cpu/{part}`` in processors since the last reading, and the room on the disk."""
        memory: dict[str, float] = defaultdict(float)
        cpu: dict[str, float] = defaultdict(float)
        for role, pid in parts:
            kind = role.partition("-")[0]
            try:
                memory[f"memory/{kind}"] += self._process(pid).memory_info().rss
                cpu[f"cpu/{kind}"] += self._cores(pid)
            except psutil.Error:  # it has ended: whoever watches it says so
                self._processes.pop(pid, None)
        free = shutil.disk_usage(self._run_dir).free
        return {**memory, **cpu, "disk_free_bytes": float(free)}

    def _process(self, pid: int) -> psutil.Process:
        if pid not in self._processes:
            self._processes[pid] = psutil.Process(pid)
        return self._processes[pid]

    def _cores(self, pid: int) -> float:
        times = self._process(pid).cpu_times()
        now_s, used_s = self._clock.now(), times.user + times.system
        then_s, before_s = self._before.get(pid, (now_s, used_s))
        self._before[pid] = now_s, used_s
        return (used_s - before_s) / (now_s - then_s) if now_s > then_s else 0.0
