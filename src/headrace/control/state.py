"""The state that the four loops of the controller share: the components of the run, its flow (the state of all groups),
its metrics, its warnings, and the request to stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.base.types.messages.scorer import TrainerState
from headrace.base.types.observation import Event
from headrace.base.types.trace import Span
from headrace.control.board import ActivityBoard
from headrace.control.config import RunSection
from headrace.control.metrics import RunMetrics
from headrace.control.observer import Observers
from headrace.control.parts import Components
from headrace.flow import Flow, FlowConfig
from headrace.rollout.environments import Curriculum

MAX_WARNINGS = 100
"""Number of kinds of warnings that are kept."""


@dataclass(slots=True, kw_only=True)
class WarningCount:
    """A kind of warning, and how often it occurred."""

    text: str
    """The text of the first warning of this kind or, once its cause has passed, the text that says so."""
    times: int = 1
    """Number of warnings of this kind."""
    latest: bool = False
    """Whether the text is that of the latest one, whose figures are not those of the others."""


def trainer_state(state: RunState, version: int) -> TrainerState:
    """Return the trainer state (step, epoch, intervals) at ``version`` of the weights, for reward functions that
    request it."""
    epochs_a_step = state.flow_config.groups_per_step / max(1, len(state.parts.tasks))
    return TrainerState(
        global_step=version,
        max_steps=state.run.steps,
        epoch=version * epochs_a_step,
        num_train_epochs=math.ceil(state.run.steps * epochs_a_step),
        save_steps=state.run.checkpoint_every,
        eval_steps=state.run.eval_every,
    )


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of one run, which its loops share. The controller makes it."""

    parts: Components
    """The components of the run: engine, learner, environment, scorers."""
    run: RunSection
    """The settings ``[run]`` of the run file."""
    flow: Flow
    """The groups of the run: which start, which are ready, and which are trained."""
    board: ActivityBoard
    """The table of what each loop does."""
    observers: Observers
    """Receive steps, events and the trace."""
    metrics: RunMetrics
    """Counts events, and makes the step records, the live view and the summary."""
    curriculum: Curriculum | None = None
    """Picks rows by the rewards of earlier attempts; ``None``: rows come in their order."""
    phase: str = "starting"
    """The present phase of the run, in words."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run is to stop."""
    stopped_by: str = ""
    """The signal that stops the run, such as ``SIGHUP``; empty for any other reason."""
    warning_counts: dict[str, WarningCount] = field(default_factory=dict)
    """The warnings so far, by kind."""

    @property
    def flow_config(self) -> FlowConfig:
        """Return the settings of the flow."""
        return self.flow.config

    def observe(self, number: int, row: int, rewards: Sequence[float]) -> None:
        """Give the curriculum, if there is one, the rewards of the admitted group ``number``, which attempted the
        dataset row ``row``. ``rewards`` is empty if there are none, as for a group that was dropped before it
        started."""
        if self.curriculum is not None:
            version = self.flow.state.groups[number].oldest_version
            assert version is not None
            self.curriculum.observe(number, row, version, rewards)

    def event(self, text: str) -> None:
        """Send the observers an event that is worth one line."""
        self.observers.event(Event(wall_s=self.metrics.wall_s, text=text))

    def warn(self, text: str, *, kind: str = "", always: bool = False) -> None:
        """Send the observers a warning, and keep it for the summary. Warnings of one ``kind`` (by default: with the
        same text) are counted together: observers get only the first of them, whose text is kept. With ``always``, they
        get this one too, and its text is kept instead."""
        kind = kind or text
        if kind not in self.warning_counts and len(self.warning_counts) >= MAX_WARNINGS:
            kind = text = "there were more warnings than are kept"
        known = kind in self.warning_counts
        if known:
            self.warning_counts[kind].times += 1
            if always:
                self.warning_counts[kind].text, self.warning_counts[kind].latest = text, True
        else:
            self.warning_counts[kind] = WarningCount(text=text)
        if known and not always:
            return
        self.observers.event(Event(wall_s=self.metrics.wall_s, text=text, level="warning"))

    def warning_over(self, text: str, *, kind: str) -> None:
        """Send the observers ``text``, which says that the cause of the warnings of ``kind`` has passed, and show it in
        their place from now on: a warning that is not true any more would mislead."""
        if kind in self.warning_counts:
            self.warning_counts[kind].text, self.warning_counts[kind].latest = text, True
        self.event(text)

    @property
    def warnings(self) -> list[str]:
        """Return one line for each kind of warning, with the number of warnings of that kind if there were several."""
        return [
            each.text
            if each.times == 1
            else f"{each.text} ({'the latest of ' if each.latest else ''}{each.times} times)"
            for each in self.warning_counts.values()
        ]

    def span(self, lane: str, name: str, start_s: float, step: int = -1, *, end_s: float | None = None) -> None:
        """Record in the event trace that the lane ``lane`` was busy with ``name`` from ``start_s`` until ``end_s`` on
        the clock; ``None`` for the end means now. ``step`` is the step or version that this belongs to, −1 for none."""
        until_s = self.parts.clock.now() if end_s is None else end_s
        self.observers.span(Span(lane=lane, name=name, start_s=start_s, end_s=until_s, step=step))

    @property
    def stop_requested(self) -> bool:
        """Return whether the run is to stop."""
        return self.stopping.is_set()

    def request_stop(self, by: str = "") -> None:
        """Ask the run to stop as soon as the steps that are already ordered are done, with a checkpoint. ``by`` is the
        signal that was received; empty for any other reason."""
        self.stopped_by = self.stopped_by or by
        self.stopping.set()
        self.flow.changed.notify()
