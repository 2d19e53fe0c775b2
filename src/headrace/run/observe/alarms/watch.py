"""The observer that runs the alarms."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.base.types.observation import Event, LiveState, StepRecord
from headrace.base.types.trace import Span
from headrace.run.observe.alarms.base import Moment, Raised
from headrace.run.observe.alarms.config import OFFERED, AlarmsConfig
from headrace.run.observe.alarms.rows import ALARMS
from headrace.run.observe.metrics import flat


class AlarmWatch:
    """An observer that runs every alarm that is on, and calls ``on_alarm`` with each that goes off and with whether
    the run is to stop."""

    def __init__(self, config: AlarmsConfig, run_dir: Path, on_alarm: Callable[[Raised, bool], None]) -> None:
        self._stop_on = config.stop_on
        self._run_dir = run_dir
        self._on_alarm = on_alarm
        self._rows = {name: row for name, row in ALARMS.items() if name not in config.off}
        self._rows |= {name: OFFERED.load(name) for name in config.on}
        self._alarms = {name: row.make(config) for name, row in self._rows.items()}

    def step(self, record: StepRecord) -> None:
        """Run the alarms on the metrics of a step."""
        numbers = flat(record)
        for name, alarm in self._alarms.items():
            self._report(name, alarm.step(numbers))

    def event(self, event: Event) -> None:
        """Do nothing: this observer has no use for events."""

    def spans(self, spans: Sequence[Span]) -> None:
        """Do nothing: this observer has no use for spans."""

    def update(self, state: LiveState) -> None:
        """Run the alarms on the present state of the run."""
        now = Moment(state=state, free_bytes=shutil.disk_usage(self._run_dir).free)
        for name, alarm in self._alarms.items():
            self._report(name, alarm.moment(now))

    def _report(self, name: str, words: str) -> None:
        """Call ``on_alarm`` where ``words`` hold a problem."""
        if words:
            self._on_alarm(Raised(name=name, words=words, advice=self._rows[name].advice), name in self._stop_on)
