"""Everything that watches a run: files, view, alarms, writers, and the account of where the time goes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO, cast

import msgspec

from headrace.base.clock import RealClock
from headrace.base.lasting import LastingStream
from headrace.base.types.observation import Event, LiveState
from headrace.control import Controller
from headrace.control.observer import Observer, Observers
from headrace.control.summary import Summary
from headrace.launch.order import ComponentStatus
from headrace.run.observe import (
    Accountant,
    AlarmWatch,
    Posting,
    Raised,
    Recorder,
    RunFacts,
    SystemWatch,
    VerdictSettings,
    WatchedLoop,
    figures_of,
    open_view,
)
from headrace.run.observe.jsonl import EVENTS_FILE, METRICS_FILE
from headrace.run.observe.terminal import PlainView, SilentView, TerminalView
from headrace.run.session.config import RunConfig

TRAINING = "training"
"""The phase that an account is of."""
SYSTEM_EVERY = 2
"""Looks at the run between two at the memory of its processes."""


class RunWatchers:
    """The watchers of one run, opened in the order given and closed in the other by ``stack``.

    Raises :class:`~headrace.base.errors.ConfigError` where a writer cannot be had.
    """

    def __init__(self, config: RunConfig, run_dir: Path, stack: ExitStack, *, settings: VerdictSettings) -> None:
        """``settings``: as far as the verdict depends on them."""
        clock = RealClock()
        self.controller: Controller | None = None
        """Hears of alarms, once it is there."""
        self._accountant = Accountant(settings)
        self._system = SystemWatch(run_dir, clock)
        self._looks = 0
        self._trains = False
        """Whether the run was in its training phase when its processes were last looked at."""
        watchers: list[Observer] = [stack.enter_context(Recorder(run_dir)), self._accountant]
        facts = RunFacts(run_dir=run_dir, config=config.model_dump(mode="json"))
        for writer in config.observe.writers:
            watchers.append(stack.enter_context(Posting(writer.kind, writer.open(facts), self._warn)))
        self._output = LastingStream(sys.stdout)
        self._output_lost = False
        self.view = stack.enter_context(_view(config, cast(TextIO, self._output)))
        watchers += [self.view, AlarmWatch(config.observe.alarms, run_dir, self._alarmed)]
        self.observers = Observers(watchers)
        loop = asyncio.get_running_loop()
        if isinstance(loop, WatchedLoop):
            self.observers.ask(loop.work.spans)
        stack.callback(self.observers.flush)

    def look(self, controller: Controller, components: list[ComponentStatus]) -> LiveState:
        """The present moment, told to all of them."""
        if not self._looks % SYSTEM_EVERY:
            self._read(controller, components)
        self._looks += 1
        live = self._accountant.shown(controller.live())
        self.observers.update(live)
        self._tell_lost_output()
        return live

    def _tell_lost_output(self) -> None:
        """Say once that nothing more can be shown; the run goes on."""
        if not self._output.lost or self._output_lost:
            return
        self._output_lost = True
        text = (
            f"standard output is gone ({self._output.lost}): the run goes on, and what it would show is in "
            f"{EVENTS_FILE} and {METRICS_FILE} (headrace watch, headrace view)"
        )
        self._warn(text)
        with suppress(OSError, ValueError):  # standard error may be gone with it
            sys.stderr.write(f"warning: {text}\n")

    def _read(self, controller: Controller, components: list[ComponentStatus]) -> None:
        """How much the processes of the run take of this machine; what they took in training goes into the account."""
        controller.state.system = self._system.read((part.role, part.pid) for part in components if not part.node)
        trained, self._trains = self._trains, controller.state.phase == TRAINING
        if self._system.usage is not None and trained and self._trains:
            self._accountant.usage(self._system.usage)

    def concluded(self, summary: Summary) -> Summary:
        """The summary with the account of the run so far, its figures, and the verdict on it."""
        account = self._accountant.total()
        if not account.seconds:
            return summary
        return msgspec.structs.replace(
            summary, account=account, verdict=self._accountant.verdict(), **figures_of(account)
        )

    def _alarmed(self, raised: Raised, stop: bool) -> None:
        self._warn(str(raised), kind=f"alarm {raised.name}")
        if stop and self.controller is not None and not self.controller.state.stop_asked:
            self.controller.state.event(f"stopping because of the alarm {raised.name} (observe.alarms.stop_on)")
            self.controller.stop()

    def _warn(self, text: str, *, kind: str = "") -> None:
        if self.controller is not None:
            self.controller.state.warn(text, kind=kind)
        else:
            self.observers.event(Event(wall_s=0.0, text=text, level="warning"))


def _view(config: RunConfig, output: TextIO) -> TerminalView:
    if config.observe.view == "none":
        return SilentView()
    if config.observe.view == "plain":
        return PlainView(output, config.run.steps)
    return open_view(output, config.run.steps)
