"""The reader of the memory and the processor time that the processes of a run use.

A *part* is one process of the run with its role, such as ``scorer-1``; its *kind* is the role without the number.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.base.clock import Clock
from headrace.base.environ import PROCESS_GONE, num_cores, thread_times_ns

Part = tuple[str, int]
"""The role and the pid of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The processor time that the processes of a run used between two readings of :class:`SystemWatch`. All times are
    in seconds."""

    seconds: float
    """The time between the readings."""
    processors_s: float
    """The processor time of all processes, divided by the number of processors that they may use."""
    used_s: Mapping[str, float]
    """The processor time, by kind of process."""
    queued_s: Mapping[str, float]
    """The time for which the thread that waited longest was ready to run and had no processor, by kind of process.
    Empty on systems other than Linux, which do not report it."""


@dataclass(slots=True, kw_only=True)
class _Sample:
    """The counters of one process at one reading, in seconds. The difference of two samples is the usage of the process
    between the two readings."""

    at_s: float
    """The time of the reading, on the clock of the watch."""
    used_s: float
    """The processor time of all its threads since it started."""
    queued_s: dict[str, float] = field(default_factory=dict)
    """The time since the start of each thread for which it was ready to run and had no processor, by the thread's id.
    Empty on systems other than Linux."""


class SystemWatch:
    """The reader of the memory and the processor time of a run's processes, which the run calls every few seconds.
    Processes of one kind (``scorer-0``, ``scorer-1``) are added up."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        """Prepare the first reading. ``run_dir`` is the run's directory, on whose disk the free space is measured."""
        self._run_dir = run_dir
        self._clock = clock
        self._processes: dict[int, psutil.Process] = {}
        """The ``psutil`` objects of the processes that were read, by pid."""
        self._last_samples: dict[int, _Sample] = {}
        """The counters of each process at the last reading, by pid."""
        self._read_s: float | None = None
        """The time of the last reading; ``None`` before the first."""
        self.usage: Usage | None = None
        """The usage between the last two readings; ``None`` before the second reading."""

    def read(self, parts: Iterable[Part]) -> dict[str, float]:
        """Return metrics by name: the memory of each kind of process (``memory/KIND``) and the free space on the disk
        of the run (``disk_free_bytes``), both in bytes. ``parts`` are the processes; one that has ended is skipped.

        From the second reading on, the result also has the usage since the last one: ``cpu/KIND``, in processors;
        ``cpu_queued/KIND``, the fraction of the time in which the thread of that kind that waited longest was ready to
        run and had no processor; and ``cpu_used_frac``, the fraction of all processors that was used. :attr:`usage` is
        replaced too.
        """
        memory: dict[str, float] = defaultdict(float)
        cpu: dict[str, float] = defaultdict(float)
        queued_s: dict[str, float] = {}
        now_s = self._clock.now()
        since_s, self._read_s = now_s - (self._read_s or now_s), now_s
        used_s: dict[str, float] = defaultdict(float)
        for role, pid in parts:
            kind = role.partition("-")[0]
            try:
                memory[f"memory/{kind}"] += self._get_process(pid).memory_info().rss
                before, sample = self._last_samples.get(pid), self._take_sample(pid)
            except PROCESS_GONE:  # the launcher reports that it has ended
                self._processes.pop(pid, None)
                continue
            self._last_samples[pid] = sample
            if before is None or sample.at_s <= before.at_s:
                continue
            took_s = sample.used_s - before.used_s
            cpu[f"cpu/{kind}"] += took_s / (sample.at_s - before.at_s)
            used_s[kind] += took_s
            waited = [queued - before.queued_s.get(thread, 0.0) for thread, queued in sample.queued_s.items()]
            if waited:
                queued_s[kind] = max(queued_s.get(kind, 0.0), *waited)
        whole_s = sum(used_s.values()) / num_cores()
        self.usage = Usage(seconds=since_s, processors_s=whole_s, used_s=used_s, queued_s=queued_s) if since_s else None
        shares = {} if self.usage is None else {"cpu_used_frac": self.usage.processors_s / since_s}
        shares |= {f"cpu_queued/{kind}": min(1.0, waited_s / since_s) for kind, waited_s in queued_s.items() if since_s}
        free = shutil.disk_usage(self._run_dir).free
        return {**memory, **cpu, **shares, "disk_free_bytes": float(free)}

    def _get_process(self, pid: int) -> psutil.Process:
        """Return the ``psutil`` object of the process ``pid``. One object is kept for each process, since it caches
        some of its readings."""
        if pid not in self._processes:
            self._processes[pid] = psutil.Process(pid)
        return self._processes[pid]

    def _take_sample(self, pid: int) -> _Sample:
        """Return the present counters of the process ``pid``. Raises one of the errors :data:`PROCESS_GONE` if the
        process has ended."""
        times = self._get_process(pid).cpu_times()
        sample = _Sample(at_s=self._clock.now(), used_s=times.user + times.system)
        sample.queued_s = {thread: waited / 1e9 for thread, (_, waited) in thread_times_ns(pid).items()}
        return sample
