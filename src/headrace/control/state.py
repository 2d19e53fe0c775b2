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
"""Maximum number of kinds of warnings; further kinds are counted as one."""


@dataclass(slots=True, kw_only=True)
class WarningCount:
    """The warnings of one kind: a text, and the number of warnings."""

    text: str
    """The text to show: the text of the first warning of this kind or, if ``latest`` is true, a later text that has
    replaced it."""
    times: int = 1
    """Number of warnings of this kind."""
    latest: bool = False
    """Whether a later text has replaced the text of the first warning."""


def make_trainer_state(state: RunState, version: int) -> TrainerState:
    """Return the trainer state (step, epoch, intervals) of the run ``state`` at ``version`` of the weights, for reward
    functions that request it."""
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
    """The state of one run, which its loops share. The controller creates it."""

    parts: Components
    """The components of the run: engine, learner, environment, scorers."""
    run: RunSection
    """The settings ``[run]`` of the run file."""
    flow: Flow
    """The flow, which contains the state of every group."""
    board: ActivityBoard
    """The table of what each loop works on or waits for."""
    observers: Observers
    """The observers, which receive steps, events and the trace."""
    metrics: RunMetrics
    """The counters of the run, from which step records, the live view and the summary are made."""
    curriculum: Curriculum | None = None
    """The curriculum, which picks rows by the rewards of earlier attempts; ``None``: rows are used in their order."""
    phase: str = "starting"
    """The current phase of the run, in words."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set when the run is requested to stop."""
    stopped_by: str = ""
    """The name of the signal that stops the run, such as ``SIGHUP``; empty for any other reason."""
    warning_counts: dict[str, WarningCount] = field(default_factory=dict)
    """The warnings so far, by kind."""

    @property
    def flow_config(self) -> FlowConfig:
        """Return the settings of the flow."""
        return self.flow.config

    def observe(self, number: int, row: int, rewards: Sequence[float]) -> None:
        """Report the rewards of the group ``number``, which attempted the dataset row with the index ``row``, to the
        curriculum, if there is one. ``rewards`` is empty for a group without rewards, such as a group that was dropped
        before it started."""
        if self.curriculum is not None:
            version = self.flow.state.groups[number].oldest_version
            assert version is not None
            self.curriculum.observe(number, row, version, rewards)

    def event(self, text: str) -> None:
        """Send an event with the text ``text`` to the observers."""
        self.observers.event(Event(wall_s=self.metrics.wall_s, text=text))

    def warn(self, text: str, *, kind: str = "", always: bool = False) -> None:
        """Send a warning to the observers, and store it for the summary. Warnings of the same ``kind`` (by default:
        with the same text) are counted together, and only the first is sent to the observers and stored. With
        ``always``, this warning is sent even if it is not the first, and its text replaces the stored text."""
        kind = kind or text
        if kind not in self.warning_counts and len(self.warning_counts) >= MAX_WARNINGS:
            kind = text = "there were more warnings than are kept"
        is_known = kind in self.warning_counts
        if is_known:
            self.warning_counts[kind].times += 1
            if always:
                self.warning_counts[kind].text, self.warning_counts[kind].latest = text, True
        else:
            self.warning_counts[kind] = WarningCount(text=text)
        if is_known and not always:
            return
        self.observers.event(Event(wall_s=self.metrics.wall_s, text=text, level="warning"))

    def resolve_warning(self, text: str, *, kind: str) -> None:
        """Send ``text``, which says that the cause of the warnings of ``kind`` has ended, to the observers as an event,
        and replace the stored text of these warnings by it."""
        if kind in self.warning_counts:
            self.warning_counts[kind].text, self.warning_counts[kind].latest = text, True
        self.event(text)

    @property
    def warnings(self) -> list[str]:
        """Return one line of text for each kind of warning, with the number of warnings if there were several."""
        return [
            each.text
            if each.times == 1
            else f"{each.text} ({'the latest of ' if each.latest else ''}{each.times} times)"
            for each in self.warning_counts.values()
        ]

    def span(self, lane: str, name: str, start_s: float, step: int = -1, *, end_s: float | None = None) -> None:
        """Add a span to the event trace: the lane ``lane`` was busy with ``name`` from ``start_s`` until ``end_s``, in
        seconds on the clock; ``None`` as ``end_s`` means now. ``step`` is the step or version to which the span
        belongs; −1 for none."""
        end_s = self.parts.clock.now() if end_s is None else end_s
        self.observers.spans([Span(lane=lane, name=name, start_s=start_s, end_s=end_s, step=step)])

    @property
    def stop_requested(self) -> bool:
        """Return whether the run is requested to stop."""
        return self.stopping.is_set()

    def request_stop(self, signal_name: str = "") -> None:
        """Request the run to stop when the steps that are already ordered are done, with a checkpoint. ``signal_name``
        is the name of the signal that was received; empty for any other reason."""
        self.stopped_by = self.stopped_by or signal_name
        self.stopping.set()
        self.flow.changed.notify()
