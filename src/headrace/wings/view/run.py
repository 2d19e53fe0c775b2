"""The reader of one run directory for all pages of the dashboard. It reads new lines of the files as they grow. A life
of a run is the time from one start or resumption of the run to the end of its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.clock import Clock
from headrace.base.errors import DataError, HeadraceError
from headrace.base.types.observation import Event, StepRecord
from headrace.base.types.trace import Span
from headrace.flow.ledger.browse import Browser, is_written
from headrace.flow.ledger.opening import LOCK_FILE, REDIS_FILE, SQLITE_FILE, is_locked
from headrace.learner.disk import Damaged, verify
from headrace.run.observe import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, describe_run, evaluations, run_name
from headrace.run.observe.rundata import CONFIG_FILE, count_clock_resets, describe_resumption, find_last_life
from headrace.wings.view.json_files import JsonFile, Tail
from headrace.wings.view.lanes import LaneIndex
from headrace.wings.view.text import DirectoryTokenizer

T = TypeVar("T")

FRESH_S = 12.0
"""Seconds without a new status after which a run counts as ended; a running run writes its status every second. A
larger difference between the clocks of two machines is reported to the user."""
LIVING = ("starting", "running")
"""The states of a run that is still running."""
MOST_EVENTS = 500
"""Number of latest events that are kept."""
MOST_CACHED = 64
"""Largest number of cached results of one run."""
CACHE_FACTOR = 20.0
"""The lifetime of a cached result, as a multiple of the time that its computation took."""
_RUN_FILES = (METRICS_FILE, TRACE_FILE, CONFIG_FILE, "status.json", "summary.json", SQLITE_FILE, REDIS_FILE)


class OpenRun:
    """A reader of the run in ``directory``: its steps, events, spans, state and ledger. It writes nothing there. Every
    method may be called from any thread.

    Raises :class:`~headrace.base.errors.DataError` if the directory is not a run directory.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        """Open the run in ``directory``; ``clock`` measures the age of its status."""
        refuse_no_run(directory)
        self.directory = directory
        self._clock = clock
        self._lock = threading.RLock()
        """Held while files are read, since any thread may call the methods."""
        self._steps: list[StepRecord] = []
        """The records of the steps so far."""
        self._events: list[Event] = []
        """The latest events."""
        self._evaluated: list[Event] = []
        """The events of the whole run that report an evaluation."""
        self._lanes, self._resets = LaneIndex(), 0
        """The index of the spans, and the number of times that the clock of the steps went back."""
        self._metrics = Tail(directory / METRICS_FILE, StepRecord)
        """Reader of the steps' lines."""
        self._trace = Tail(directory / TRACE_FILE, Span)
        """Reader of the spans' lines."""
        self._event_lines = Tail(directory / EVENTS_FILE, Event)
        """Reader of the events' lines."""
        self.config = JsonFile(directory / CONFIG_FILE)
        self.summary = JsonFile(directory / "summary.json")
        self.status = JsonFile(directory / "status.json")
        self.live = JsonFile(directory / LIVE_FILE)
        self.parts = JsonFile(directory / "parts.json")
        self._cache: dict[str, tuple[float, Any]] = {}
        """Cached results by key, each with the time at which it is too old."""
        self._browser: tuple[tuple[int, bool], Browser] | None = None
        """The open reader of the ledger, with the inode of the file and whether it was being written; ``None`` if it is
        not open."""
        self._latest_status: tuple[float, float] | None = None
        """The time in the latest status, and the time by this process's clock at which the status was first read."""
        self._status_advanced = False
        """Whether a newer status has arrived since the run was opened. The run is then alive, even if the clock of its
        machine differs from the local clock."""
        self.words = DirectoryTokenizer(str(self.config.section("model").get("path") or ""))

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return run_name(self.directory, self.config.tree)

    @property
    def about(self) -> str:
        """Return a line for display with the model, the dataset and the reward of the run."""
        return describe_run(self.config.tree)

    @property
    def steps(self) -> list[StepRecord]:
        """Return the records of the steps in order. For a step that was repeated after a resumption, only the later
        record is returned."""
        with self._lock:
            while fresh := self._metrics.read():
                self._steps = _append_steps([] if self._metrics.restarted else self._steps, fresh)
            return list(self._steps)

    @property
    def events(self) -> list[Event]:
        """Return the latest events, the oldest first."""
        with self._lock:
            self._read_events()
            return list(self._events)

    def _read_events(self) -> None:
        """Read the lines that were added to the run's events since the last call."""
        fresh = self._event_lines.read()
        if self._event_lines.restarted:
            self._events, self._evaluated = [], []
        self._events = [*self._events, *fresh][-MOST_EVENTS:]
        self._evaluated += [event for event in fresh if event.text.startswith("held-out ")]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Return the version and the mean held-out reward of every evaluation in all lives of the run."""
        with self._lock:
            self._read_events()
            living = self.state()["state"] in LIVING
            return evaluations(self.steps, {} if living else self.summary.tree, self._evaluated)

    @contextmanager
    def lanes(self) -> Iterator[LaneIndex]:
        """Return a context with an up-to-date index of the run's spans, which record what each part did between two
        moments. The index does not change within the context."""
        with self._lock:
            resets = count_clock_resets(self.steps)
            if resets != self._resets:
                self._resets, self._lanes = resets, LaneIndex(resets)
                self._trace = Tail(self.directory / TRACE_FILE, Span)
            while spans := self._trace.read():
                if self._trace.restarted:
                    self._lanes = LaneIndex(resets)
                self._lanes.add(spans)
            yield self._lanes

    def browser(self) -> Browser:
        """Return the reader of the run's ledger. The ledger is opened again if its file was replaced, or if a process
        started or stopped writing it.

        Raises :class:`~headrace.base.errors.LedgerError` if the ledger cannot be read.
        """
        with self._lock:
            file = self.directory / SQLITE_FILE
            which = (file.stat().st_ino if file.exists() else -1, is_written(file))
            if self._browser is None or self._browser[0] != which:
                self.close()
                self._browser = (which, Browser.open_run(self.directory))
            return self._browser[1]

    def state(self) -> dict[str, Any]:
        """Return the state of the run (``starting``, ``running``, ``finished``, ``stopped``, ``failed``, ``killed`` or
        ``unknown``), its phase while it runs, the cause of its end, and its progress in steps."""
        status, summary, steps = self.status.tree, self.summary.tree, self.steps
        living = self._is_running(status)
        ended = str(summary.get("status") or self._without_summary(status))
        total = status.get("steps_total") or self.config.section("run").get("steps")
        return {
            "state": ("running" if steps else "starting") if living else ended,
            "phase": str(status.get("phase") or "") if living else "",
            "cause": "" if living else str(summary.get("cause") or ""),
            "steps_done": steps[-1].version if steps else 0,
            "steps_of_last_life": len(find_last_life(steps)),
            "steps_total": total if isinstance(total, int) else None,
            "written_s": status.get("written_s"),
        }

    def _without_summary(self, status: dict[str, Any]) -> str:
        """Return the state of a run that has no fresh ``status`` and no summary. If a process still holds the lock of
        the directory, it is ``stopped`` with a status and ``starting`` without; otherwise ``killed`` with a status,
        ``failed`` if there is only a lock file, and ``unknown`` without one."""
        if is_locked(self.directory):
            return "stopped" if status else "starting"
        if status:
            return "killed"
        return "failed" if (self.directory / LOCK_FILE).exists() else "unknown"

    def notes(self) -> list[str]:
        """Return notes for the user: a sentence for each file that is missing or cannot be read, and for each figure
        that may be wrong."""
        with self.lanes():
            notes = [self._metrics.problem, self._trace.problem, self._event_lines.problem]
        notes += [file.problem for file in (self.config, self.summary, self.status, self.parts)]
        notes += [self._clock_skew_note(), describe_resumption(self.steps)]
        if self.config.tree:
            try:
                verify(self.directory, [CONFIG_FILE])
            except Damaged as error:
                notes.append(f"{error.problem}: the settings that are shown are not those of the run")
        if not (self.directory / METRICS_FILE).exists():
            notes.append(f"{METRICS_FILE} is not there: no step has ended yet")
        if not self.summary.tree and not self.summary.problem and not self._is_running(self.status.tree):
            notes.append("summary.json is not there: the run has not ended, or was killed")
        if not (self.directory / TRACE_FILE).exists():
            notes.append(f"{TRACE_FILE} is not there: the timeline is empty")
        try:
            self.browser()
        except HeadraceError as error:
            notes.append(f"{error.problem}; {error.remedy}. All that is not about single episodes still shows.")
        return [note for note in notes if note]

    def stamp(self) -> tuple[object, ...]:
        """Return a value that changes whenever a file of the run changes. The server compares it with the previous
        value to detect changes, of which it notifies the pages."""
        files = (self.summary, self.status, self.live)
        names = (*_RUN_FILES, EVENTS_FILE, f"{SQLITE_FILE}-wal")
        return (*(JsonFile(self.directory / name).stamp for name in names), *(file.stamp for file in files))

    def cached(self, key: str, work: Callable[[], T]) -> T:
        """Return the result of ``work``, or a cached result with the same ``key`` that is still fresh. The cache avoids
        computing slow results at every request while a run writes."""
        with self._lock:
            until_s, found = self._cache.get(key, (0.0, None))
            began_s = self._clock.now()
            if found is not None and began_s < until_s:
                return found  # type: ignore[no-any-return]
        result = work()
        now_s = self._clock.now()
        with self._lock:
            while len(self._cache) >= MOST_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = now_s + CACHE_FACTOR * (now_s - began_s), result
        return result

    def setting(self, section: str, key: str) -> Any:
        """Return the value of ``key`` in ``section`` of the run's settings; ``None`` if it is not set."""
        return self.config.section(section).get(key)

    def close(self) -> None:
        """Close the run's ledger."""
        with self._lock:
            if self._browser is not None:
                self._browser[1].close()
                self._browser = None

    def _is_running(self, status: dict[str, Any]) -> bool:
        """Return whether the run is running: its ``status`` is fresh and does not report that the controller has
        ended."""
        written, parts = status.get("written_s"), status.get("components")
        controller = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        return isinstance(written, int | float) and self._is_fresh(written) and controller.get("state") != "ended"

    def _is_fresh(self, written_s: float) -> bool:
        """Return whether a status that was written at ``written_s`` (seconds since 1970, by the run's machine) is
        recent. At first the clocks of both machines are compared. Once a newer status has arrived while the dashboard
        is open, only this machine's clock is used."""
        with self._lock:
            now_s = self._clock.now()
            if self._latest_status is None or self._latest_status[0] != written_s:
                self._status_advanced = self._latest_status is not None
                self._latest_status = (written_s, now_s)
            if self._status_advanced:
                return now_s - self._latest_status[1] < FRESH_S
            return abs(self._clock.wall() - written_s) < FRESH_S

    def _clock_skew_note(self) -> str:
        """Return a note for the user about the difference between the clocks of the run's machine and of this machine;
        empty if the difference is small or not yet known, or if the run has ended."""
        written = self.status.tree.get("written_s")
        if not self._status_advanced or not self._is_running(self.status.tree) or not isinstance(written, int | float):
            return ""
        ahead_s = written - self._clock.wall()
        words = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        return (
            f"the clock of the machine that runs it is {words} this one's: times are by its clock"
            if abs(ahead_s) > FRESH_S
            else ""
        )


def _append_steps(steps: list[StepRecord], fresh: list[StepRecord]) -> list[StepRecord]:
    """Append the records ``fresh`` to ``steps``, and return ``steps``. The record of a step that was repeated after a
    resumption replaces the earlier record of that step, and of all later steps."""
    for record in fresh:
        while steps and steps[-1].step >= record.step:
            steps.pop()
        steps.append(record)
    return steps


def refuse_no_run(directory: Path) -> None:
    """Raise :class:`~headrace.base.errors.DataError` unless ``directory`` is a run directory."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", remedy="name the directory of a run")
    if not _is_run(directory):
        raise DataError(
            f"{directory} holds no run: none of {', '.join(_RUN_FILES)} is there",
            remedy="name a directory that a run has written, or one that holds such directories",
        )


def find_runs(directories: list[Path], *, limit: int = 32) -> list[Path]:
    """Return the run directories that the user has named: each of ``directories`` if it is a run directory, or else the
    runs one or two levels below it, the latest first; at most ``limit`` in all.

    Raises :class:`~headrace.base.errors.DataError` if there is no run.
    """
    found: list[Path] = []
    for directory in directories:
        if not directory.is_dir() or _is_run(directory):
            refuse_no_run(directory)
            found.append(directory)
            continue
        below = sorted({*directory.glob("*"), *directory.glob("*/run")}, key=find_change_time, reverse=True)
        runs = [each for each in below if each.is_dir() and _is_run(each)]
        if not runs:
            refuse_no_run(directory)
        found += runs
    return list(dict.fromkeys(path.resolve() for path in found))[:limit]


def _is_run(directory: Path) -> bool:
    """Return whether a directory is a run directory: whether it has a file that only runs write."""
    return any((directory / name).exists() for name in _RUN_FILES)


def find_change_time(directory: Path) -> float:
    """Return the time at which the run in ``directory`` last wrote a file, in seconds since 1970; 0 if there are no
    files of a run."""
    newest = [_get_change_time(directory / name) for name in _RUN_FILES]
    return max(newest, default=0.0)


def _get_change_time(path: Path) -> float:
    """Return the time at which a file was changed, in seconds since 1970; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
