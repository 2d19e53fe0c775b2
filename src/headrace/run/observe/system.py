"""What the processes of a run take of their machine."""

from __future__ import annotations

import contextlib
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.base.clock import Clock
from headrace.base.environ import num_cores

Part = tuple[str, int]
"""Role and pid of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the processes of a run took of their machine between two looks."""

    seconds: float
    """Between the looks."""
    processors_s: float
    """Their processor time, over the number of processors that they may use."""
    used_s: Mapping[str, float]
    """By kind of process: its processor time."""
    queued_s: Mapping[str, float]
    """By kind of process: how long its thread that waited longest could have run, and had no processor. Empty where the
    system does not tell: only Linux does."""


@dataclass(slots=True, kw_only=True)
class _Look:
    """One process, as it was when it was looked at."""

    at_s: float
    used_s: float
    """Processor time of all its threads since it began."""
    queued_s: dict[str, float] = field(default_factory=dict)
    """By thread: how long it could have run, and had no processor."""


class SystemWatch:
    """Reads memory and processor time of the parts; those of one kind (``scorer-0``, ``scorer-1``) are added up."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._processes: dict[int, psutil.Process] = {}
        self._before: dict[int, _Look] = {}
        self._read_s: float | None = None
        self.usage: Usage | None = None
        """Between the last two readings; ``None`` before the second."""

    def read(self, parts: Iterable[Part]) -> dict[str, float]:
        """``memory/{part}`` in bytes, the room on the disk and, from the second reading on, of the time since the last
        one: ``cpu/{part}`` in processors, ``cpu_queued/{part}`` as a fraction, and ``cpu_used_frac``."""
        memory: dict[str, float] = defaultdict(float)
        cpu: dict[str, float] = defaultdict(float)
        queued_s: dict[str, float] = {}
        now_s = self._clock.now()
        since_s, self._read_s = now_s - (self._read_s or now_s), now_s
        used_s: dict[str, float] = defaultdict(float)
        for role, pid in parts:
            kind = role.partition("-")[0]
            try:
                memory[f"memory/{kind}"] += self._process(pid).memory_info().rss
                before, look = self._before.get(pid), self._look(pid)
            except psutil.Error:  # it has ended: whoever watches it says so
                self._processes.pop(pid, None)
                continue
            self._before[pid] = look
            if before is None or look.at_s <= before.at_s:
                continue
            took_s = look.used_s - before.used_s
            cpu[f"cpu/{kind}"] += took_s / (look.at_s - before.at_s)
            used_s[kind] += took_s
            waited = [told_s - before.queued_s.get(thread, 0.0) for thread, told_s in look.queued_s.items()]
            if waited:
                queued_s[kind] = max(queued_s.get(kind, 0.0), *waited)
        whole_s = sum(used_s.values()) / num_cores()
        self.usage = Usage(seconds=since_s, processors_s=whole_s, used_s=used_s, queued_s=queued_s) if since_s else None
        told = {} if self.usage is None else {"cpu_used_frac": self.usage.processors_s / since_s}
        told |= {f"cpu_queued/{kind}": min(1.0, waited_s / since_s) for kind, waited_s in queued_s.items() if since_s}
        free = shutil.disk_usage(self._run_dir).free
        return {**memory, **cpu, **told, "disk_free_bytes": float(free)}

    def _process(self, pid: int) -> psutil.Process:
        if pid not in self._processes:
            self._processes[pid] = psutil.Process(pid)
        return self._processes[pid]

    def _look(self, pid: int) -> _Look:
        times = self._process(pid).cpu_times()
        look = _Look(at_s=self._clock.now(), used_s=times.user + times.system)
        for told in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # a thread that has just ended
                look.queued_s[told.parent.name] = int(told.read_text().split()[1]) / 1e9
        return look
