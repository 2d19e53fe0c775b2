"""Asks the alarms: an observer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe.alarms.base import Moment, Raised
from headrace.run.observe.alarms.config import AlarmsConfig
from headrace.run.observe.alarms.rows import ALARMS
from headrace.run.observe.metrics import flat


class AlarmWatch:
    """Tells ``on_alarm`` of every alarm when it goes off, and whether the run is to stop for it."""

    def __init__(self, config: AlarmsConfig, run_dir: Path, on_alarm: Callable[[Raised, bool], None]) -> None:
        self._stop_on = config.stop_on
        self._run_dir = run_dir
        self._on_alarm = on_alarm
        self._alarms = {name: row.make(config) for name, row in ALARMS.items() if name not in config.off}

    def step(self, record: StepRecord) -> None:
        """A step has ended."""
        numbers = flat(record)
        for name, alarm in self._alarms.items():
            self._tell(name, alarm.step(numbers))

    def event(self, event: Event) -> None:
        """Nothing."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Nothing."""

    def update(self, state: LiveState) -> None:
        """The present moment."""
        now = Moment(state=state, free_bytes=shutil.disk_usage(self._run_dir).free)
        for name, alarm in self._alarms.items():
            self._tell(name, alarm.moment(now))

    def _tell(self, name: str, words: str) -> None:
        if words:
            self._on_alarm(Raised(name=name, words=words, advice=ALARMS[name].advice), name in self._stop_on)
