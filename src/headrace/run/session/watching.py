"""The watchers of a run: files, terminal view, alarms, metric writers, and the account of where the time goes.

A *watcher* is an observer that receives steps, events and spans of the run from the controller; an *account* is the
record of where the time of the run went, from which the verdict names its bottleneck.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO, cast

import msgspec

from headrace.base.clock import RealClock
from headrace.base.lasting import LossTolerantStream
from headrace.base.types.observation import Event, LiveState
from headrace.control import Controller
from headrace.control.metrics import Summary
from headrace.control.observer import Observer, Observers
from headrace.launch.order import ComponentStatus
from headrace.run.observe import (
    Accountant,
    AlarmWatch,
    QueuedWriter,
    Raised,
    Recorder,
    RunFacts,
    SystemWatch,
    VerdictSettings,
    WatchedLoop,
    open_view,
)
from headrace.run.observe.jsonl import EVENTS_FILE, METRICS_FILE
from headrace.run.observe.terminal import PlainView, TerminalView
from headrace.run.observe.trace import is_engine
from headrace.run.session.config import RunConfig

TRAINING = "training"
"""The name of the phase of a run whose processor time the account covers."""
SYSTEM_EVERY = 2
"""The number of calls of ``update`` for each reading of the memory and the processor time of the run's processes."""
NUM_FREQUENT_UPDATES = 10
"""The number of first calls of ``update`` in training that all make such a reading, so that a short run has figures."""


class RunWatchers:
    """The watchers of one run. The constructor opens them, and its ``stack`` closes them in the reverse order.

    Raises :class:`~headrace.base.errors.ConfigError` if a writer cannot be opened.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stack: ExitStack, *, settings: VerdictSettings) -> None:
        """Open the watchers that ``config`` chooses, for the run in ``run_dir``; ``stack`` closes them. ``settings``
        are the values of the run's settings that the verdict's advice names."""
        clock = RealClock()
        self.controller: Controller | None = None
        """The controller, which receives warnings and alarms once it exists."""
        self._accountant = Accountant(settings)
        """The watcher that computes the account and the verdict."""
        self._system = SystemWatch(run_dir, clock)
        """The reader of the memory and the processor time of the run's processes."""
        self._num_updates = self._num_training_updates = 0
        """The number of calls of :meth:`update`, and how many of them the training phase had."""
        self._was_training = False
        """Whether the run was in its training phase at the last reading of its processes."""
        watchers: list[Observer] = [stack.enter_context(Recorder(run_dir)), self._accountant]
        facts = RunFacts(run_dir=run_dir, config=config.model_dump(mode="json"))
        for writer in config.observe.writers:
            watchers.append(stack.enter_context(QueuedWriter(writer.kind, writer.open(facts), self._warn)))
        self._output = LossTolerantStream(sys.stdout)
        self._has_reported_lost_output = False
        self.view = stack.enter_context(_open_view(config, cast(TextIO, self._output)))
        """The terminal view of the run."""
        watchers += [self.view, AlarmWatch(config.observe.alarms, run_dir, self._on_alarm)]
        self.observers = Observers(watchers)
        """All watchers together, to which the controller passes steps, events and spans."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, WatchedLoop):
            self.observers.add_span_source(loop.work.take_spans)
        stack.callback(self.observers.flush)
        stack.callback(self._warn_of_lost_output)  # the terminal may be closed during the last update, or after it

    def update(self, controller: Controller, components: list[ComponentStatus]) -> LiveState:
        """Return the present state of the run, from ``controller``, with the account and the verdict, after passing it
        on to all watchers. The run calls this method once a second; ``components`` are the states of its processes."""
        self._num_training_updates += controller.state.phase == TRAINING
        if not self._num_updates % SYSTEM_EVERY or 0 < self._num_training_updates <= NUM_FREQUENT_UPDATES:
            self._read_processes(controller, components)
        self._num_updates += 1
        engines = [part for part in components if is_engine(part.role)]
        self._accountant.set_engines({part.role for part in engines})
        controller.state.metrics.num_engines = sum(part.state == "ready" for part in engines)
        live = self._accountant.add_account(controller.live())
        self.observers.update(live)
        self._warn_of_lost_output()
        return live

    def _warn_of_lost_output(self) -> None:
        """Warn once if standard output can no longer be written, for example because its terminal was closed. The run
        continues without this output."""
        self._output.detect_loss()
        if not self._output.lost or self._has_reported_lost_output:
            return
        self._has_reported_lost_output = True
        text = (
            f"standard output is gone ({self._output.lost}): the run continues, and what it would show is in "
            f"{EVENTS_FILE} and {METRICS_FILE} (headrace watch, headrace view)"
        )
        self._warn(text)
        with suppress(OSError, ValueError):  # standard error may be lost too
            sys.stderr.write(f"warning: {text}\n")

    def _read_processes(self, controller: Controller, components: list[ComponentStatus]) -> None:
        """Read how much memory and processor time those of the processes ``components`` that run on this machine use,
        as metrics of the next step of ``controller``. The account receives the processor time since the last reading,
        if the run was training at both readings."""
        controller.state.metrics.system = self._system.read(
            (part.role, part.pid) for part in components if not part.node
        )
        was_training, self._was_training = self._was_training, controller.state.phase == TRAINING
        if self._system.usage is not None and was_training and self._was_training:
            self._accountant.add_usage(self._system.usage)

    def add_account(self, summary: Summary) -> Summary:
        """Return a copy of the run's ``summary`` with the account of the whole life, the figures that follow from it,
        and the verdict; ``summary`` itself if no step has ended."""
        account = self._accountant.complete()
        if not account.seconds:
            return summary
        return msgspec.structs.replace(
            summary, account=account, verdict=self._accountant.judge_total(), **account.figures()
        )

    def _on_alarm(self, raised: Raised, stop: bool) -> None:
        """Record as a warning of the run that the alarm ``raised`` went off; with ``stop``, also stop the run after the
        steps that the learner has received. This is the callback of the alarms."""
        self._warn(str(raised), kind=f"alarm {raised.name}")
        if stop and self.controller is not None and not self.controller.state.stop_requested:
            self.controller.state.event(f"stopping because of the alarm {raised.name} (observe.alarms.stop_on)")
            self.controller.stop()

    def _warn(self, text: str, *, kind: str = "") -> None:
        """Record ``text`` as a warning of the run; before the controller exists, only pass it on to the observers as an
        event. Warnings of one ``kind`` are shown once and then only counted; if ``kind`` is empty, the kind is the
        text."""
        if self.controller is not None:
            self.controller.state.warn(text, kind=kind)
        else:
            self.observers.event(Event(wall_s=0.0, text=text, level="warning"))


def _open_view(config: RunConfig, output: TextIO) -> TerminalView:
    """Return the terminal view that the setting ``observe.view`` chooses, which prints to ``output``."""
    if config.observe.view == "none":
        return TerminalView()
    if config.observe.view == "plain":
        return PlainView(output, config.run.steps)
    return open_view(output, config.run.steps)
