"""One run directory, kept open: read on as it grows, and asked by every page."""

from __future__ import annotations

import os
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
from headrace.flow.ledger.opening import REDIS_FILE, SQLITE_FILE
from headrace.run.observe import EVENTS_FILE, LIVE_FILE, METRICS_FILE, TRACE_FILE, run_about, run_name
from headrace.run.observe.rundata import about_lives, last_life
from headrace.wings.view.lanes import LaneIndex
from headrace.wings.view.sheet import JsonFile
from headrace.wings.view.tail import Tail
from headrace.wings.view.text import DirectoryTokenizer

T = TypeVar("T")

FRESH_S = 12.0
"""A living run writes its status every second; after so long without, it is not thought to live. Two clocks that are
further apart than this are told of."""
LIVING = ("starting", "running")
"""The states of a run that goes on."""
MOST_EVENTS = 500
MOST_KNOWN = 64
AS_RARE_AS = 20.0
"""A figure is worked out again after so many times the time that it took."""
_MARKS = (METRICS_FILE, TRACE_FILE, "config.json", "status.json", "summary.json", SQLITE_FILE, REDIS_FILE)


class OpenRun:
    """The run in ``directory``. Every method may be called from any thread.

    Raises :class:`~headrace.base.errors.DataError` if there is no run.
    """

    def __init__(self, directory: Path, clock: Clock) -> None:
        refuse_no_run(directory)
        self.directory = directory
        self._clock = clock
        self._one_at_a_time = threading.RLock()
        self._steps: list[StepRecord] = []
        self._events: list[Event] = []
        self._lanes = LaneIndex()
        self._metrics = Tail(directory / METRICS_FILE, StepRecord)
        self._trace = Tail(directory / TRACE_FILE, Span)
        self._told = Tail(directory / EVENTS_FILE, Event)
        self.config = JsonFile(directory / "config.json")
        self.summary = JsonFile(directory / "summary.json")
        self.status = JsonFile(directory / "status.json")
        self.live = JsonFile(directory / LIVE_FILE)
        self.parts = JsonFile(directory / "parts.json")
        self._known: dict[str, tuple[float, Any]] = {}
        self._browser: tuple[tuple[int, bool], Browser] | None = None
        self._heard: tuple[float, float] | None = None
        """The time of the latest status, and when it was first seen by our own clock."""
        self._renewed = False
        """Whether a newer status has come since this was opened: the run lives, whatever its clock says."""
        self.words = DirectoryTokenizer(str(self.config.section("model").get("path") or ""))

    @property
    def name(self) -> str:
        """What people call it."""
        return run_name(self.directory, self.config.tree)

    @property
    def about(self) -> str:
        """Its model, its rows and what it is rewarded for, in a line."""
        return run_about(self.config.tree)

    @property
    def steps(self) -> list[StepRecord]:
        """The steps that count, in order: of a step that was made again after a resume, the later line."""
        with self._one_at_a_time:
            while fresh := self._metrics.read():
                self._steps = _joined([] if self._metrics.restarted else self._steps, fresh)
            return list(self._steps)

    @property
    def events(self) -> list[Event]:
        """The latest, oldest first."""
        with self._one_at_a_time:
            fresh = self._told.read()
            self._events = [*([] if self._told.restarted else self._events), *fresh][-MOST_EVENTS:]
            return list(self._events)

    @contextmanager
    def lanes(self) -> Iterator[LaneIndex]:
        """Every span, indexed; nobody adds to it meanwhile."""
        with self._one_at_a_time:
            while spans := self._trace.read():
                if self._trace.restarted:
                    self._lanes = LaneIndex()
                self._lanes.add(spans)
            yield self._lanes

    def browser(self) -> Browser:
        """Its ledger. Raises :class:`~headrace.base.errors.LedgerError` where it cannot be looked through."""
        with self._one_at_a_time:
            file = self.directory / SQLITE_FILE
            which = (file.stat().st_ino if file.exists() else -1, is_written(file))
            if self._browser is None or self._browser[0] != which:
                if self._browser is not None:
                    self._browser[1].close()
                    self._browser = None
                self._browser = (which, Browser.of_run(self.directory))
            return self._browser[1]

    def state(self) -> dict[str, Any]:
        """What the run is doing, or how it ended: ``state`` and ``cause`` in words, and how far it is."""
        status, summary, steps = self.status.tree, self.summary.tree, self.steps
        living = self._lives(status)
        ended = str(summary.get("status") or ("unknown" if not status else "killed"))
        total = status.get("steps_total") or self.config.section("run").get("steps")
        return {
            "state": ("running" if steps else "starting") if living else ended,
            "phase": str(status.get("phase") or "") if living else "",
            "cause": "" if living else str(summary.get("cause") or ""),
            "steps_done": steps[-1].version if steps else 0,
            "steps_of_last_life": len(last_life(steps)),
            "steps_total": total if isinstance(total, int) else None,
            "written_s": status.get("written_s"),
        }

    def notes(self) -> list[str]:
        """What cannot be read, or believed, in words."""
        with self.lanes():
            told = [self._metrics.problem, self._trace.problem, self._told.problem]
        told += [sheet.problem for sheet in (self.config, self.summary, self.status, self.parts)]
        told += [self._skew(), about_lives(self.steps)]
        if not (self.directory / METRICS_FILE).exists():
            told.append(f"{METRICS_FILE} is not there: no step has ended yet")
        if not (self.directory / TRACE_FILE).exists():
            told.append(f"{TRACE_FILE} is not there: the timeline is empty")
        try:
            self.browser()
        except HeadraceError as error:
            told.append(f"{error.problem}; {error.remedy}. All that is not about single episodes still shows.")
        return [note for note in told if note]

    def stamp(self) -> tuple[object, ...]:
        """Differs from an earlier one whenever something changed on disk."""
        sheets = (self.summary, self.status, self.live)
        return (*(_size(self.directory / name) for name in (*_MARKS, EVENTS_FILE)), *(s.stamp for s in sheets),
                _size(self.directory / f"{SQLITE_FILE}-wal"))  # fmt: skip

    def remembered(self, key: str, work: Callable[[], T]) -> T:
        """What ``work`` returned lately: while a run writes, what takes long is not worked out all the time."""
        with self._one_at_a_time:
            until_s, found = self._known.get(key, (0.0, None))
            began_s = self._clock.now()
            if found is not None and began_s < until_s:
                return found  # type: ignore[no-any-return]
        made = work()
        now_s = self._clock.now()
        with self._one_at_a_time:
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = now_s + AS_RARE_AS * (now_s - began_s), made
        return made

    def setting(self, section: str, key: str) -> Any:
        """A value of its configuration; ``None`` where it has none."""
        return self.config.section(section).get(key)

    def close(self) -> None:
        """Let go of its ledger."""
        with self._one_at_a_time:
            if self._browser is not None:
                self._browser[1].close()
                self._browser = None

    def _lives(self, status: dict[str, Any]) -> bool:
        written, parts = status.get("written_s"), status.get("components")
        controller = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], dict) else {}
        return isinstance(written, int | float) and self._is_fresh(written) and controller.get("state") != "ended"

    def _is_fresh(self, written_s: float) -> bool:
        """By the clocks of both machines at first; once a newer status has come, by ours alone."""
        with self._one_at_a_time:
            now_s = self._clock.now()
            if self._heard is None or self._heard[0] != written_s:
                self._renewed = self._heard is not None
                self._heard = (written_s, now_s)
            if self._renewed:
                return now_s - self._heard[1] < FRESH_S
            return abs(self._clock.wall() - written_s) < FRESH_S

    def _skew(self) -> str:
        """How far the clock of the run's machine is from ours, while it lives and that is far; else empty."""
        written = self.status.tree.get("written_s")
        if not self._renewed or not self._lives(self.status.tree) or not isinstance(written, int | float):
            return ""
        ahead_s = written - self._clock.wall()
        words = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        return (
            f"the clock of the machine that runs it is {words} this one's: times are by its clock"
            if abs(ahead_s) > FRESH_S
            else ""
        )


def _joined(steps: list[StepRecord], fresh: list[StepRecord]) -> list[StepRecord]:
    for record in fresh:
        while steps and steps[-1].step >= record.step:
            steps.pop()
        steps.append(record)
    return steps


def refuse_no_run(directory: Path) -> None:
    """Raise :class:`~headrace.base.errors.DataError` unless a run has begun in ``directory``."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory", remedy="name the directory of a run")
    if not any((directory / name).exists() for name in _MARKS):
        raise DataError(
            f"{directory} holds no run: none of {', '.join(_MARKS)} is there",
            remedy="name a directory that a run has written, or one that holds such directories",
        )


def find_runs(asked: list[Path], *, most: int = 32) -> list[Path]:
    """The run directories that are meant: each of ``asked`` itself, or, where it is none, the runs one or two levels
    below it, the latest first.

    Raises :class:`~headrace.base.errors.DataError` where there is no run.
    """
    found: list[Path] = []
    for directory in asked:
        if not directory.is_dir() or _is_run(directory):
            refuse_no_run(directory)
            found.append(directory)
            continue
        below = sorted({*directory.glob("*"), *directory.glob("*/run")}, key=changed_s, reverse=True)
        runs = [each for each in below if each.is_dir() and _is_run(each)]
        if not runs:
            refuse_no_run(directory)
        found += runs
    return list(dict.fromkeys(path.resolve() for path in found))[:most]


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in _MARKS)


def changed_s(directory: Path) -> float:
    """When the run in ``directory`` wrote last, in seconds since 1970; 0 where there is none."""
    newest = [_mtime(directory / name) for name in _MARKS]
    return max(newest, default=0.0)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
